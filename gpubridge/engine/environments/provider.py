"""Python environments of stubs: the server's own, or one that the model names."""

from __future__ import annotations

import asyncio
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
from gpubridge.engine.environments.unpacker import Unpacker
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError, invalid

PARAMETER = "EXECUTION_ENV_PATH"
_TRITON_STUB = "triton_python_backend_stub"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_INTERPRETERS = ("bin/python3", "bin/python")

_ENVIRONMENTS = ("pb_exec_env_model.py.tar.gz", "venv")
"""Names beside the backend's ``model.py``: Triton's for an archive, ours for a directory."""
_SECONDS = 60.0
"""An interpreter on a network file system may start slowly the first time."""

CLEAN_VARIABLES = (
    "PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE LC_* LD_LIBRARY_PATH LD_PRELOAD PYTHON* "
    "VIRTUAL_ENV XDG_CACHE_HOME CUDA_* NVIDIA_* OMP_* MKL_* OPENBLAS_* GPUBRIDGE_*"
)
"""Variables that stubs and model libraries need; no proxies, tokens or service addresses."""
_CLEAN = re.compile("|".join(CLEAN_VARIABLES.replace("*", ".*").split()))

_OLDEST = (3, 9)
_ERROR_LENGTH = 500
# Any Python from 2.6 on accepts these flags and runs this. The stub itself checks for NumPy.
_ASK = ("-E", "-s", "-S", "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StubEnvironment:
    """An interpreter and its environment variables.

    ``root``, ``archive``: where its files were unpacked, and from what, if they were.
    """

    python: str
    variables: dict[str, str]
    root: Path | None = None
    archive: Path | None = None


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
        if name != "PYTHONHOME" and (not clean or _CLEAN.fullmatch(name))
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


async def check_interpreter(environment: StubEnvironment, source: Path) -> str:
    """Return the version of an environment's interpreter.

    ``source``: the user's path, for errors.

    Raises BridgeError: INVALID_ARG when it does not run, or is older than a stub needs.
    """
    version = await _ask(environment, source)
    try:
        numbers = tuple(int(number) for number in version.split("."))
    except ValueError:
        raise _unusable(
            environment, source, f"it is no Python: asked for its version it says {version!r}"
        ) from None
    if numbers < _OLDEST:
        raise _unusable(
            environment,
            source,
            f"it is Python {version}; a stub needs Python 3.9 or newer: make the environment with a "
            "newer one",
        )
    return version


async def _ask(environment: StubEnvironment, source: Path) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            environment.python,
            *_ASK,
            env=environment.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _unusable(
            environment, source, f"it cannot be started: {error.strerror or error}"
        ) from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except asyncio.TimeoutError:
        raise _unusable(
            environment, source, f"it did not say its version within {_SECONDS:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip()[-_ERROR_LENGTH:]
        raise _unusable(
            environment,
            source,
            f"it does not run on this machine: it ended with code {process.returncode}: {said}",
        )
    return out.decode(errors="replace").strip()


def _unusable(environment: StubEnvironment, source: Path, why: str) -> BridgeError:
    return invalid(
        f"{PARAMETER} {source}: its interpreter {environment.python} cannot be used: {why}"
    )


class ModelEnvironments:
    """Finds the environments of models, and unpacks archives.

    - ``cache``: directory of unpacked environments; None: in the user's cache directory. Created for
      the first archive.
    - ``limit``: limit of unpacked bytes per archive.
    - ``clean``: stubs get `CLEAN_VARIABLES` only.
    """

    def __init__(
        self, cache: Path | None, limit: int, threads: LoadThreads, *, clean: bool = False
    ) -> None:
        self._threads = threads
        self._clean = clean
        self._unpacker = Unpacker(cache, limit, threads)
        self._checked: dict[tuple[str, int, int, int], str] = {}

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
        version = await self._checked_version(environment, path)
        _logger.info("model '%s' runs on Python %s of %s", config.name, version, path)
        return environment

    async def restored(self, environment: StubEnvironment) -> StubEnvironment:
        """Return an environment for another stub; unpacks it again if its files were removed.

        Raises BridgeError for an unusable environment.
        """
        root, archive = environment.root, environment.archive
        if root is None or archive is None:
            return environment
        restored = await self._unpacker.restore(archive, root)
        if restored == root:
            return environment
        _logger.warning("environment %s has changed: its stubs run in %s now", archive, restored)
        variables = stub_variables(os.environ, clean=self._clean)
        find = partial(environment_at, restored, archive, variables)
        found = await self._threads.run(f"looking for the interpreter in {restored}", find)
        return replace(found, root=restored, archive=archive)

    async def close(self) -> None:
        """Stop the processes that unpack."""
        await self._unpacker.close()

    async def _checked_version(self, environment: StubEnvironment, source: Path) -> str:
        """Return the interpreter's version, cached while its file is unchanged."""
        status = await self.stat_interpreter(environment)
        key = (environment.python, status.st_dev, status.st_ino, status.st_mtime_ns)
        version = self._checked.get(key)
        if version is None:
            version = self._checked[key] = await check_interpreter(environment, source)
        return version

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
