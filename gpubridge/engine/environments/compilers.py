"""Finds a C++20 compiler. Needs the standard library only: the backend that builds the package loads this file, too."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
_PROBE = """
#include <bit>
#include <concepts>
#include <span>
#include <string>
std::size_t probe(std::span<const std::string> words) { return std::bit_ceil(words.size()); }
"""
_SECONDS = 60.0


@functools.cache
def system_compiler() -> str | None:
    """Return the first compiler that builds a shared library from C++20; None where there is none."""
    for path in filter(None, map(shutil.which, COMPILERS)):
        if _works(path):
            return path
    return None


def _works(path: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        output = f"{folder}/probe.so"
        command = [path, "-std=c++20", "-shared", "-fPIC", "-o", output, str(source)]
        try:
            run = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return not run.returncode


def compiler_command() -> list[str] | None:
    """Return the command of a compiler: ``CXX``, that of the system, or of the ziglang package; else None."""
    chosen = os.environ.get("CXX", "")
    if chosen.strip():
        return shlex.split(chosen)
    found = system_compiler()
    return [found] if found else _zig()


def _zig() -> list[str] | None:
    """Return zig's compiler, for the C library that `cmake/zig.cmake` names."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        return None
    musl = any(Path("/lib").glob("ld-musl-*.so.1"))
    target = f"{platform.machine()}-linux-{'musl' if musl else 'gnu.2.28'}"
    zig = str(Path(package.origin).with_name("zig"))
    return [zig, "c++", "-target", target, "-mcpu=baseline"]
