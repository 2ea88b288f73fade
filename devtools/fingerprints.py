"""Fingerprints: whether what something was made from, or tested with, has changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["NATIVE_SOURCES", "digest_of_files", "digest_of_texts", "section_of"]

# What the compiled module is made from.
NATIVE_SOURCES = ("CMakeLists.txt", "cmake", "csrc", "pyproject.toml")
_MADE = {".pyc", ".so"}


def digest_of_texts(*texts: str) -> str:
    """Return the fingerprint of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()


def digest_of_files(root: Path, names: Iterable[str]) -> str:
    """Return the fingerprint of files by their names and bytes, and of all files in folders.

    Bytecode and compiled modules, which no clean checkout has, do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(_files(root, names)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _files(root: Path, names: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for name in names:
        place = root / name
        inside = place.rglob("*") if place.is_dir() else [place]
        found.update(path for path in inside if path.is_file() and path.suffix not in _MADE)
    return found


def section_of(document: str, name: str) -> str:
    """Return a table of a TOML document as it is written: Python 3.10 has no parser of TOML."""
    _, _, rest = document.partition(f"\n[{name}]\n")
    return rest.partition("\n[")[0]
