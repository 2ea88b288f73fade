"""C++ compilers, and builds by CMake with one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from devtools.console import Failed
from devtools.processes import find_program, run

__all__ = ["build", "cached", "choose_compiler"]


def choose_compiler(*names: str) -> str | None:
    """Return the path of the compiler that ``CXX`` names, or else the first of these that there is."""
    return find_program(os.environ.get("CXX", ""), *names)


def cached(root: Path) -> dict[str, str]:
    """Return this process's variables, and those with which CMake compiles through ccache where there is one.

    Another checkout's build of the same sources then takes seconds.
    """
    variables = dict(os.environ)
    if find_program("ccache") is None or find_program("c++", "g++", "clang++") is None:
        return variables
    return {
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CCACHE_BASEDIR": str(root),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_SLOPPINESS": "pch_defines,time_macros",
        **variables,
    }


def build(tools: Path, compiler: str, sources: Path, built: Path, *options: str) -> None:
    """Configure and build a folder of sources.

    Parameters
    ----------
    tools
        The folder with the programs ``cmake`` and ``ninja``.
    built
        The folder of what is built; CMake's output is kept beside it, and shown after a failure.
    options
        Further ones of CMake's first call.

    Raises
    ------
    Failed
        It cannot be built.
    """
    built.mkdir(parents=True, exist_ok=True)
    configure = [
        *(tools / "cmake", "-S", sources, "-B", built, "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DCMAKE_CXX_COMPILER={compiler}", *options),
    ]
    log = built.with_name(f"{built.name}.log")
    for command in configure, [tools / "cmake", "--build", built]:
        if run(command, cwd=sources, variables=cached(sources), log=log):
            sys.stderr.write(log.read_text(errors="replace"))
            raise Failed(f"{sources} cannot be built; the log is above")
