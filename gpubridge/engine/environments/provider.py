"""Python environments of stubs: the server's own, or one that the model names."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpubridge.config import ModelConfig, ModelSettings
from gpubridge.engine.environments.interpreter import Interpreter, Unusable, inspect, load_failure
from gpubridge.engine.environments.stub_modules import StubModules
from gpubridge.engine.environments.unpacker import Unpacker
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import invalid
from gpubridge.tensor.native import DISABLE_VARIABLE

PARAMETER = "EXECUTION_ENV_PATH"
_TRITON_STUB = "triton_python_backend_stub"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_INTERPRETERS = ("bin/python3", "bin/python")

_ENVIRONMENTS = ("pb_exec_env_model.py.tar.gz", "venv")
"""Names beside the backend's ``model.py``: Triton's for an archive, ours for a directory."""
CLEAN_VARIABLES = (
    "PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE LC_* LD_LIBRARY_PATH LD_PRELOAD PYTHON* "
    "VIRTUAL_ENV XDG_CACHE_HOME CUDA_* NVIDIA_* OMP_* MKL_* OPENBLAS_* GPUBRIDGE_*"
)
"""Variables that stubs and model libraries need; no proxies, tokens or service addresses."""
_CLEAN = re.compile("|".join(CLEAN_VARIABLES.replace("*", ".*").split()))

_MODULE = "GPUBRIDGE_STUB_MODULE"
"""Tells `gpubridge.stub.bootstrap` the file of the compiled module, or why there is none; models do not see it."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StubEnvironment:
    """An interpreter and its environment variables.

    - ``root``, ``archive``: where its files were unpacked, and from what, if they were.
    - ``interpreter``: what the interpreter says of itself, if it is not the server's.
    """

    python: str
    variables: dict[str, str]
    root: Path | None = None
    archive: Path | None = None
    interpreter: Interpreter | None = None


def environment_path(model_dir: Path, parameters: dict[str, str]) -> Path | None:
    """Return the path in a model's ``EXECUTION_ENV_PATH``, which may not exist; None without it.

    Raises BridgeError: INVALID_ARG for a relative path.
    """
    stub = model_dir / _TRITON_STUB
    if stub.exists():
        _logger.warning(
            "%s is ignored: stubs here run on any Python from 3.9 on; name the model's environment "
            "with the parameter %s",
            stub,
            PARAMETER,
        )
    value = ModelSettings.from_parameters(parameters, model_dir.name).execution_env_path
    if not value:
        return None
    path = Path(value.replace(_MODEL_DIRECTORY, str(model_dir.resolve())))
    if not path.is_absolute() or "\0" in value:
        raise invalid(
            f"Failed to get the canonical path for {value}. (parameter {PARAMETER} expects an "
            f"absolute path, or one that begins with {_MODEL_DIRECTORY})"
        )
    return path


def stub_variables(given: Mapping[str, str], *, clean: bool) -> dict[str, str]:
    """Return the server's variables for stubs; ``clean``: `CLEAN_VARIABLES` only."""
    return {
        name: value
        for name, value in given.items()
        if name not in ("PYTHONHOME", _MODULE) and (not clean or _CLEAN.fullmatch(name))
    }


def environment_at(root: Path, source: Path, variables: dict[str, str]) -> StubEnvironment:
    """Return the interpreter in an unpacked environment.

    - ``source``: the user's path: `root`, or the archive.
    - ``variables``: the stub's variables, which this adapts.

    Raises BridgeError: INVALID_ARG when there is no interpreter in it.
    """
    python = next((root / name for name in _INTERPRETERS if (root / name).exists()), None)
    if python is None:
        raise invalid(f"{PARAMETER} {source} {_missing_interpreter(root)}")
    variables["VIRTUAL_ENV"] = str(root)
    variables["PATH"] = _prepend(root / "bin", variables.get("PATH"))
    variables["LD_LIBRARY_PATH"] = _prepend(root / "lib", variables.get("LD_LIBRARY_PATH"))
    # The server's packages were built for the server's interpreter.
    variables.pop("PYTHONPATH", None)
    return StubEnvironment(str(python), variables)


def _missing_interpreter(root: Path) -> str:
    """Return the error text for an environment without interpreter."""
    for name in _INTERPRETERS:
        if (root / name).is_symlink():
            target = (root / name).readlink()
            return (
                f"cannot be used: its {name} is a link to {target}, which this machine does not have; "
                "install that Python here, or use an environment that brings its own (conda-pack)"
            )
    missing = "holds no bin/python3: expected a virtual environment (venv, uv or conda)"
    nested = sorted(str(p.relative_to(root)) for p in root.glob("*/bin/python*"))
    if nested:
        folder = nested[0].partition("/")[0]
        missing += f", got one in its folder {folder!r}: that has to be the top"
    return missing


def _prepend(folder: Path, path: str | None) -> str:
    return f"{folder}:{path}" if path else str(folder)


def environment_parameters(config: ModelConfig) -> dict[str, str]:
    """Return a model's parameters, with its backend's environment by default."""
    parameters = config.parameters
    if config.backend_file is None or parameters.get(PARAMETER):
        return parameters
    for name in _ENVIRONMENTS:
        path = config.backend_file.parent / name
        if path.exists():
            return {**parameters, PARAMETER: str(path.absolute())}
    return parameters


class ModelEnvironments:
    """Finds the environments of models, unpacks archives, and has modules built.

    - ``cache``: directory of unpacked environments and built modules; None: in the user's cache directory.
      Created for the first of them.
    - ``limit``: limit of unpacked bytes per archive.
    - ``clean``: stubs get `CLEAN_VARIABLES` only.
    - ``build_seconds``: how long a load waits for the build of a module; 0: none is built.
    """

    def __init__(
        self,
        cache: Path | None,
        limit: int,
        threads: LoadThreads,
        *,
        clean: bool = False,
        build_seconds: float = 0.0,
    ) -> None:
        self._threads = threads
        self._clean = clean
        self._unpacker = Unpacker(cache, limit, threads)
        self._modules = StubModules(cache, threads, build_seconds)
        self._inspected: dict[tuple[str | int, ...], Interpreter] = {}
        self._loads: dict[tuple[str | int, ...], str] = {}

    async def of_model(self, directory: Path, config: ModelConfig) -> StubEnvironment:
        """Return the environment that a model's parameters name; by default the server's own.

        Raises BridgeError for an unusable environment.
        """
        look = partial(self._threads.run, f"looking for the environment of model '{config.name}'")
        path, is_directory = await look(partial(_find_environment, directory, config))
        variables = stub_variables(os.environ, clean=self._clean)
        if path is None:
            return StubEnvironment(sys.executable, variables)
        root = path if is_directory else await self._unpacker.unpack(path)
        environment = await look(partial(environment_at, root, path, variables))
        if not is_directory:
            environment = replace(environment, root=root, archive=path)
        interpreter = await self._inspect(environment, path)
        _logger.info("model '%s' runs on Python %s of %s", config.name, interpreter.version, path)
        return await self._with_module(replace(environment, interpreter=interpreter), wait=True)

    async def restored(self, environment: StubEnvironment) -> StubEnvironment:
        """Return an environment for another stub; unpacks it again if its files were removed.

        Raises BridgeError for an unusable environment.
        """
        root, archive = environment.root, environment.archive
        if root is not None and archive is not None:
            restored = await self._unpacker.restore(archive, root)
            if restored != root:
                _logger.warning(
                    "environment %s has changed: its stubs run in %s now", archive, restored
                )
                variables = stub_variables(os.environ, clean=self._clean)
                find = partial(environment_at, restored, archive, variables)
                found = await self._threads.run(f"looking for the interpreter in {restored}", find)
                interpreter = await self._inspect(found, archive)
                environment = replace(
                    found, root=restored, archive=archive, interpreter=interpreter
                )
        # A process that died is replaced at once.
        return await self._with_module(environment, wait=False)

    async def close(self) -> None:
        """Stop the processes that unpack and build."""
        await self._unpacker.close()
        await self._modules.close()

    async def _with_module(self, environment: StubEnvironment, *, wait: bool) -> StubEnvironment:
        """Return an environment with the compiled module for its interpreter, if there is one."""
        interpreter = environment.interpreter
        if interpreter is None or environment.variables.get(DISABLE_VARIABLE) == "1":
            return environment
        loads = partial(self._load_failure, environment)
        module = await self._modules.choose(interpreter, loads, wait=wait)
        return replace(environment, variables={**environment.variables, _MODULE: module})

    async def _load_failure(self, environment: StubEnvironment, module: str) -> str:
        """Return why an interpreter does not load a module, or nothing; asked once for the same files."""
        try:
            state = await self._threads.run(f"reading {module}", partial(_state, module))
        except OSError as error:
            return str(error)
        key = (module, *state, *await self._state_of(environment))
        if key not in self._loads:
            self._loads[key] = await load_failure(environment.python, environment.variables, module)
        return self._loads[key]

    async def _inspect(self, environment: StubEnvironment, source: Path) -> Interpreter:
        """Return what an interpreter says of itself, cached while its file is unchanged.

        ``source``: the user's path, for errors. Raises BridgeError: INVALID_ARG.
        """
        key = await self._state_of(environment)
        if key not in self._inspected:
            try:
                found = await inspect(environment.python, environment.variables)
            except Unusable as error:
                raise invalid(
                    f"{PARAMETER} {source}: its interpreter {environment.python} cannot be used: {error}"
                ) from error
            self._inspected[key] = found
        return self._inspected[key]

    async def _state_of(self, environment: StubEnvironment) -> tuple[str | int, ...]:
        status = await self.stat_interpreter(environment)
        return environment.python, status.st_dev, status.st_ino, status.st_mtime_ns

    async def stat_interpreter(self, environment: StubEnvironment) -> os.stat_result:
        """Return the state of an interpreter's file, after reading a byte of it in a thread.

        Starting an interpreter on a dead mount would block the event loop. Raises BridgeError:
        INVALID_ARG.
        """
        python = environment.python
        try:
            return await self._threads.run(f"reading {python}", partial(_read_first, python))
        except OSError as error:
            raise invalid(f"the interpreter {python} cannot be read: {error}") from error


def _find_environment(directory: Path, config: ModelConfig) -> tuple[Path | None, bool]:
    """Return the environment path of a model, and whether it is a directory."""
    path = environment_path(directory, environment_parameters(config))
    return path, path is not None and _is_directory(path)


def _state(path: str) -> tuple[int, ...]:
    status = Path(path).stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_first(path: str) -> os.stat_result:
    """Read a byte of a file, if permitted; return the file's state."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return os.stat(path)  # noqa: PTH116  (an open file's is the same type)
    try:
        os.read(descriptor, 1)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_directory(path: Path) -> bool:
    """Return whether a path is a directory; raises BridgeError if it does not exist."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise invalid(
            f"Path {path} does not exist. The Python environment should contain an 'activate' "
            "script. (expected an environment with bin/python3 there, or an archive of one: "
            f"parameter {PARAMETER})"
        ) from error
    except OSError as error:
        raise invalid(f"{PARAMETER} {path} cannot be read: {error.strerror or error}") from error
