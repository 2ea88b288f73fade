"""Imports go down: the contracts of pyproject.toml hold, and they catch what they are for."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
ACYCLIC = Path("tests", "codebase", "acyclic.toml")
# An editable installation answers for the package before PYTHONPATH does: back to Python's finders.
LINT = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint(folder, config="pyproject.toml"):
    """Run import-linter over the package in a folder; return its exit code and what it printed."""
    finished = run_command(
        [sys.executable, "-c", LINT, "--no-cache", "--config", str(folder / config)],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )
    return finished.returncode, finished.stdout + finished.stderr


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that a test may break."""
    shutil.copytree(
        ROOT / "gpubridge",
        tmp_path / "gpubridge",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(folder, module, line):
    path = folder / "gpubridge" / module
    path.write_text(path.read_text() + f"\n{line}\n")


def test_imports_go_down():
    code, printed = lint(ROOT)
    assert code == 0, printed
    assert "gpubridge.errors" not in printed


UPWARDS = {
    (
        "tensor/dtypes.py",
        "import gpubridge.transport.messages",
    ): "tensor is not allowed to import gpubridge.transport",
    (
        "engine/workers.py",
        "from gpubridge.protocol import status",
    ): "engine is not allowed to import gpubridge.protocol",
    (
        "protocol/status.py",
        "def late():\n    from gpubridge.frontend import routes",
    ): "protocol is not allowed to import gpubridge.frontend",
    (
        "stub/loader.py",
        "from gpubridge import config",
    ): "stub is not allowed to import gpubridge.config",
}


def test_imports_that_go_up_are_caught(copy):
    for module, line in UPWARDS:
        plant(copy, module, line)
    code, printed = lint(copy)
    assert code != 0
    assert [each for each in UPWARDS.values() if f"gpubridge.{each}" not in printed] == [], printed


def test_a_module_without_a_layer_is_caught(copy):
    (copy / "gpubridge" / "helpers.py").write_text("")
    code, printed = lint(copy)
    assert code != 0
    assert "helpers" in printed


def test_a_cycle_among_the_modules_of_a_package_is_caught(copy):
    shutil.copy(ROOT / ACYCLIC, copy / "acyclic.toml")
    assert lint(copy, "acyclic.toml")[0] == 0
    plant(copy, "engine/memory/regions.py", "import gpubridge.engine.devices.manager")
    code, printed = lint(copy, "acyclic.toml")
    assert code != 0
    assert ".memory -> .devices" in printed
