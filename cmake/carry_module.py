"""Builds the stub's module for one interpreter, for a wheel that carries it: PYTHON SOURCES FOLDER COMPILER..."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from gpubridge.engine.environments.interpreter import STABLE_ABI, inspect, load_failure
from gpubridge.engine.environments.module_build import compile_module
from gpubridge.engine.environments.module_recipe import Recipe


async def main(python: str, source: str, folder: str, *compiler: str) -> None:
    """Build ``_native.ABI.so`` in a folder, and try to load it."""
    interpreter = await inspect(python, os.environ)
    if reason := interpreter.refusal():
        raise SystemExit(f"error: no module can be built for {python}: {reason}")
    stable = interpreter.abi == STABLE_ABI
    output = Path(folder, f"_native.{interpreter.abi}.so")
    recipe = Recipe(output.name, compiler, interpreter.include, stable)
    compile_module(recipe, Path(source), output, lambda _done, _total: None)
    if failure := await load_failure(python, os.environ, str(output)):
        raise SystemExit(f"error: {python} does not load {output}: {failure}")


asyncio.run(main(*sys.argv[1:]))
