"""The compiled module of stubs in models' own interpreters: ours, one that the package carries, or one built here.

A build runs in a process beside the server, once for each ABI; loads wait for it, for a limited time. What it
made is kept (`gpubridge.engine.environments.module_cache`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gpubridge
from gpubridge.engine.cache_directory import open_cache, trusted_caches
from gpubridge.engine.environments.compilers import compiler_command
from gpubridge.engine.environments.interpreter import STABLE_ABI, Interpreter
from gpubridge.engine.environments.module_cache import ModuleCache
from gpubridge.engine.environments.module_recipe import Recipe
from gpubridge.engine.load_progress import load_step
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError
from gpubridge.tensor.native import native_path

_logger = logging.getLogger(__name__)

_NAME = "native"
_BUILDER = "module_build.py"
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from gpubridge.engine.environments.module_build import main; sys.exit(main(sys.argv[2:]))"
)
"""Its path has the standard library and this package only."""
_LONGEST_BUILD_SECONDS = 900.0
_STOP_SECONDS = 5.0

LoadFailure = Callable[[str], Awaitable[str]]
"""Tries to load a module in an interpreter; returns why that fails, or nothing."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The build of a module from ``source``, and the entry of the cache that it becomes."""

    key: str
    recipe: Recipe
    source: Path
    cache: Path


class StubModules:
    """Finds and builds modules; owns the processes that build.

    - ``cache``: directory for built modules; None: in the user's cache directory.
    - ``patience``: seconds that a load waits for a build; 0: none is built.
    """

    def __init__(self, cache: Path | None, threads: LoadThreads, patience: float) -> None:
        self._cache = cache
        self._threads = threads
        self._patience = patience
        self._running: dict[str, asyncio.Task[str]] = {}
        # Why builds of this server failed; they are not tried again.
        self._failed: dict[str, str] = {}
        self._steps: dict[str, tuple[str, float | None]] = {}
        # A build takes all processors.
        self._turn = asyncio.Lock()

    async def choose(
        self, interpreter: Interpreter, loads: LoadFailure, *, wait: bool = True
    ) -> str:
        """Return the path of a module that loads, built if need be; else why there is none.

        A path begins with a slash, a reason does not. ``wait``: whether to wait for a build.
        """
        found = await self.find(interpreter, loads)
        if found.startswith("/"):
            return found
        plan = await self._threads.run("looking for a compiler", partial(self.plan, interpreter))
        built = plan if isinstance(plan, str) else await self._built(plan, interpreter, wait)
        if not built:
            return await self.find(interpreter, loads)
        return f"{found}; {built}" if found else built

    async def find(self, interpreter: Interpreter, loads: LoadFailure) -> str:
        """Return the path of a module that exists and loads; else why one does not, or nothing."""
        if reason := interpreter.refusal():
            return reason
        look = partial(_candidates, interpreter, self._cache)
        failures = ""
        for path in await self._threads.run(f"looking for a module of {interpreter}", look):
            failure = await loads(str(path))
            if not failure:
                return str(path)
            failures = f"its interpreter does not load {path}: {failure}"
        return failures

    def plan(self, interpreter: Interpreter) -> BuildPlan | str:
        """Return how to build a module for an interpreter, or why that is not possible; may take seconds."""
        compiler = compiler_command()
        if reason := interpreter.refusal() or self._obstacle(interpreter, compiler):
            return reason
        option = "--backend-config=python,environment-cache=DIR"
        try:
            cache = open_cache(
                _NAME, _below(self._cache), "compiled modules cannot be kept in", option
            )
        except BridgeError as error:
            return error.message
        stable = interpreter.abi == STABLE_ABI
        recipe = Recipe(_file_name(interpreter), compiler or (), interpreter.include, stable)
        return BuildPlan(_key(interpreter), recipe, _source(), cache)

    def _obstacle(self, interpreter: Interpreter, compiler: Sequence[str] | None) -> str:
        """Return why no module can be built, with the cure, or nothing."""
        if not self._patience:
            obstacle = "none is built, as --backend-config=python,module-build-seconds=0 says; let it be built"
        elif not any(_source().glob("csrc/*.cpp")):
            obstacle = "its source is absent, too; install gpubridge again, from its source archive"
        elif not interpreter.include:
            obstacle = (
                "that interpreter has no Python.h to build one with; install its headers (Debian, Ubuntu: "
                "python3-dev; Fedora: python3-devel; those of pyenv, conda and uv have them)"
            )
        elif compiler is None:
            obstacle = (
                "there is no C++20 compiler to build one with; install g++, or: "
                f"{sys.executable} -m pip install ziglang"
            )
        else:
            return ""
        return f"no module for {interpreter} comes with this installation, and {obstacle}"

    async def close(self) -> None:
        """Stop the processes that build."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _built(self, plan: BuildPlan, interpreter: Interpreter, wait: bool) -> str:
        """Have a module built; return why there is no module, or nothing. It outlives its callers."""
        key = plan.key
        if key in self._failed:
            return self._failed[key]
        task = self._running.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._build(plan, interpreter))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        doing = f"the compiled module of stubs for {interpreter}"
        patience = self._patience if wait else 0.0
        with load_step(lambda: self._steps.get(key, (doing, None))):
            done, _ = await asyncio.wait({task}, timeout=patience)
        if not done:
            return (
                f"its build takes longer than {patience:g} s; processes that start after it use it"
            )
        return "the server is stopping" if task.cancelled() else task.result()

    async def _build(self, plan: BuildPlan, interpreter: Interpreter) -> str:
        """Build a module; return why that failed, or nothing."""
        async with self._turn:
            clock = asyncio.get_running_loop().time
            begin = clock()
            compiler = " ".join(plan.recipe.compiler)
            _logger.info(
                "building the compiled module of stubs for %s with %s", interpreter, compiler
            )
            try:
                answer = await asyncio.wait_for(self._run(plan), _LONGEST_BUILD_SECONDS)
            except asyncio.TimeoutError:
                answer = {"error": f"it took longer than {_LONGEST_BUILD_SECONDS:g} s"}
            except OSError as error:
                answer = {"error": f"no process can be started: {error}"}
            finally:
                self._steps.pop(plan.key, None)
            if answer.get("built"):
                _logger.info(
                    "the module for %s is built after %.1f s, in %s",
                    interpreter,
                    clock() - begin,
                    plan.cache / plan.key,
                )
                return ""
            reason = (
                f"its build with {compiler} failed: {answer.get('error', 'its process was killed')}"
            )
            self._failed[plan.key] = reason
            return reason

    async def _run(self, plan: BuildPlan) -> dict[str, Any]:
        """Run the process that builds; return the last that it said."""
        words = (str(plan.source), str(plan.cache), plan.key, json.dumps(asdict(plan.recipe)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(gpubridge.__file__).parents[1])),
            *(str(os.getpid()), *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        said: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                said = json.loads(line)
                doing = f"the compiled module of stubs: {said.get('doing', '')}"
                self._steps[plan.key] = doing, said.get("part")
            await process.wait()
        finally:
            if process.returncode is None:
                # Its compilers belong to its group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Limited: a process that waits for a device or a mount survives even SIGKILL.
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_STOP_SECONDS)
        return said


def _below(configured: Path | None) -> Path | None:
    return None if configured is None else configured / _NAME


def _file_name(interpreter: Interpreter) -> str:
    return f"_native.{interpreter.abi}.so"


def _own() -> Path:
    """Return the file of the server's own module."""
    path = native_path()
    assert path is not None
    return Path(path)


def _source() -> Path:
    return _own().with_name("stub_source")


def _candidates(interpreter: Interpreter, cache: Path | None) -> list[Path]:
    """Return the modules for an interpreter that exist, the server's own first."""
    own, name = _own(), _file_name(interpreter)
    found = [own] if own.name in (name, f"_native.{interpreter.tag}.so") else []
    found += [path for path in [own.with_name("stub_modules") / name] if path.exists()]
    for folder in trusted_caches(_NAME, _below(cache)):
        built = ModuleCache(folder).find(_key(interpreter), name)
        if built is not None:
            found.append(built)
    return found


def _key(interpreter: Interpreter) -> str:
    """Return the name of an entry: a digest of the sources, the ABI and the machine."""
    about = (_digest(_source()), interpreter.abi, platform.machine())
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


@cache
def _digest(source: Path) -> str:
    """Return a digest of the sources and of what compiles them; they do not change while a server runs."""
    digest = hashlib.sha256(Path(__file__).with_name(_BUILDER).read_bytes())
    for path in sorted(source.rglob("*")):
        if path.is_file():
            digest.update(f"\0{path.relative_to(source)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
