"""Which tests run compiled code: they get the marker ``plane``, and ``./dev sanitize`` runs them instrumented.

A file of `tests/unit` is one of them when its imports, or those of what it imports, lead to the compiled module: so
a new file cannot be forgotten. `EXEMPT` has the files that are left out, each with the reason. All of `tests/fuzz` is.
This is a plugin of pytest.
"""

import functools
import re
from pathlib import Path

import pytest

__all__ = ["EXEMPT", "is_plane", "reaching"]

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("gpubridge", "tests", "benchmarks")
_MODULES = {"gpubridge._native", "gpubridge.dataplane", "gpubridge.tensor.native"}
# Parsing all files takes twenty times as long.
_TEXT = re.compile(r'""".*?"""', re.DOTALL)
_IMPORT = re.compile(
    r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|.*)|import\s+(.*))", re.MULTILINE
)
_ADDRESSES = "a sanitizer needs addresses of its own, of which it leaves none"
EXEMPT = {
    "test_no_memory.py": _ADDRESSES,
    "test_packed_environments.py": _ADDRESSES,
    "test_environment_store.py::test_an_environment_is_unpacked_again_for_the_next_stub_when_the_cache_was_emptied": _ADDRESSES,
    "test_wire_memory.py::test_no_memory_is_left_of_calls_that_are_broken_off": "a sanitizer keeps freed memory for a while",
}
"""Files and tests of `tests/unit` that reach the module and are not run under sanitizers, with the reason."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests, where a choice by marks asks for it: the imports of all files are read for that."""
    if "plane" in (config.option.markexpr or ""):
        for item in items:
            if is_plane(item.path) and f"{item.path.name}::{item.originalname}" not in EXEMPT:
                item.add_marker(pytest.mark.plane)


def is_plane(path: Path) -> bool:
    """Return whether a test file is run under sanitizers."""
    if ROOT / "tests" / "fuzz" in path.parents:
        return True
    unit = ROOT / "tests" / "unit" in path.parents
    return unit and path.name not in EXEMPT and path in reaching(ROOT)


@functools.cache
def reaching(root: Path) -> frozenset[Path]:
    """Return the files below a folder whose imports lead to the compiled module."""
    files = {
        _name(path.relative_to(root)): path
        for folder in _FOLDERS
        for path in (root / folder).rglob("*.py")
    }
    importers: dict[str, set[str]] = {}
    for name, path in files.items():
        for imported in _imports(path):
            importers.setdefault(imported, set()).add(name)
    found: set[str] = set()
    left = set(_MODULES)
    while left:
        new = importers.get(left.pop(), set()) - found
        found |= new
        left |= new
    return frozenset(files[name] for name in found)


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever in it, and names that may be modules; programs in texts do not count."""
    found: set[str] = set()
    for module, names, modules in _IMPORT.findall(_TEXT.sub("", path.read_text())):
        if module:
            found.add(module)
            found.update(f"{module}.{name}" for name in re.findall(r"\w+", names))
        else:
            found.update(re.findall(r"[\w.]+", modules))
    return found
