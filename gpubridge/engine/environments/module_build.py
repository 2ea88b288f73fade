"""The process that builds the stub's module for another interpreter: a compiler runs for each file.

It prints one JSON object per line: what it does, and at the end the result. Only its server waits for
it; when that is killed, it ends, and the next builder removes what it left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gpubridge.engine.environments.module_cache import ModuleCache
from gpubridge.engine.environments.module_recipe import Recipe
from gpubridge.parent_death import die_with

_FLAGS = [
    "-std=c++20",
    "-O2",
    "-DNDEBUG",
    "-DNB_COMPACT_ASSERTIONS",
    "-DGPUBRIDGE_STUB_ONLY",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-stack-protector",
    "-ffunction-sections",
    "-fdata-sections",
    "-w",
    # nanobind names `stderr`, which Python.h of the stable ABI does not bring.
    "-include",
    "stdio.h",
]
_LINK = ["-shared", "-Wl,--gc-sections", "-Wl,-s"]
_STATIC = ("-static-libstdc++", "-static-libgcc")
"""An environment may have a C++ library that is older than the compiler's."""
_ERROR_LENGTH = 500
_NICE = 10
_COMPILERS = 4
"""Each takes some 300 MiB."""

Tell = Callable[[int, int], None]
"""Called with the numbers of compiled and of all files."""


class BuildFailed(Exception):
    """The compiler refused; the message is its first error."""


def main(arguments: list[str]) -> int:
    """Build a module into the cache; returns the exit code.

    ``arguments``: the server's process id, the sources, the cache, the key of the entry, and the recipe's
    fields as JSON.
    """
    server, source, folder, key, fields = arguments
    die_with(int(server))
    os.umask(0o077)
    # Serving has priority.
    os.nice(_NICE)
    recipe = Recipe(**json.loads(fields))
    cache = ModuleCache(Path(folder))
    try:
        with cache.locked(
            key, lambda: _print({"doing": "waiting for another process that builds it"})
        ):
            if cache.find(key, recipe.name) is None:
                with cache.new_entry(key, recipe.name) as fresh:
                    compile_module(recipe, Path(source), fresh, _tell)
    except (BuildFailed, OSError) as error:
        _print({"error": str(error)})
        return 1
    _print({"built": True})
    return 0


def compile_module(recipe: Recipe, source: Path, output: Path, tell: Tell) -> None:
    """Compile all of ``source`` to the file ``output``; raises BuildFailed and OSError."""
    # The longest first.
    files = [source / "nanobind/src/nb_combined.cpp", *sorted(source.glob("csrc/**/*.cpp"))]
    include = [source / "csrc", *(source / "nanobind" / each for each in ("include", "src"))]
    include += [source / "nanobind/ext/robin_map/include", Path(recipe.include)]
    abi = ["-DPy_LIMITED_API=0x030C0000"] if recipe.stable else []
    command = [*recipe.compiler, *_FLAGS, *abi, *(f"-I{each}" for each in include)]
    with tempfile.TemporaryDirectory(dir=output.parent) as objects:
        _compile_all(command, files, Path(objects), tell)
        link = [
            *recipe.compiler,
            *_LINK,
            "-o",
            str(output),
            *sorted(map(str, Path(objects).iterdir())),
        ]
        failure = _run([*link, *_STATIC])
        # A system may lack the static libraries.
        if failure and (failure := _run(link)):
            raise BuildFailed(failure)


def _compile_all(command: list[str], files: Sequence[Path], objects: Path, tell: Tell) -> None:
    """Run a compiler for each file, some of them at once; raises BuildFailed."""
    left = list(enumerate(files))
    running: list[subprocess.Popen[bytes]] = []
    at_once = min(len(os.sched_getaffinity(0)), _COMPILERS)
    try:
        while left or running:
            while left and len(running) < at_once:
                number, file = left.pop(0)
                line = [*command, "-c", str(file), "-o", str(objects / f"{number}.o")]
                running.append(_start(line))
            ended = running.pop(0)
            _, said = ended.communicate()
            if ended.returncode:
                raise BuildFailed(_first_error(said))
            tell(len(files) - len(left) - len(running), len(files))
    finally:
        for each in running:
            each.kill()
            each.communicate()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _run(command: list[str]) -> str:
    """Run a command; return why it failed, or nothing."""
    run = _start(command)
    _, said = run.communicate()
    return _first_error(said) if run.returncode else ""


def _first_error(said: bytes) -> str:
    lines = said.decode(errors="replace").splitlines()
    found = next((line for line in lines if "error" in line), lines[-1] if lines else "")
    return (found or "the compiler said nothing")[:_ERROR_LENGTH]


def _tell(done: int, total: int) -> None:
    _print({"doing": "compiling", "part": done / total})


def _print(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
