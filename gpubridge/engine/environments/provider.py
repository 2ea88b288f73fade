"""What models' stubs run on: the server's interpreter, or that of an environment of the model."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

from gpubridge.engine.environment import (
    PARAMETER,
    StubEnvironment,
    environment_at,
    environment_path,
    own_environment,
)
from gpubridge.engine.environments.probe import check_interpreter
from gpubridge.engine.environments.store import open_store
from gpubridge.engine.environments.unpacker import Unpacker
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["ModelEnvironments"]

_logger = logging.getLogger(__name__)


class ModelEnvironments:
    """Finds the environments of models, and has them unpacked where need be.

    Parameters
    ----------
    cache : Path or None
        Where unpacked environments are kept; None for the user's cache directory. Nothing is made
        there before the first archive.
    limit : int
        The most bytes that may come out of one archive.
    """

    def __init__(self, cache: Path | None, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._unpacker: Unpacker | None = None
        self._checked: dict[tuple[str, int, int, int], str] = {}

    async def of_model(
        self, model: str, directory: Path, parameters: dict[str, str]
    ) -> StubEnvironment:
        """Return what a model's parameters ask for; without, the server's own interpreter.

        Raises
        ------
        BridgeError
            With what is wrong with the environment, and what to do.
        """
        path = environment_path(directory, parameters)
        if path is None:
            return own_environment()
        # Disks of the network may be slow, even to say what is there.
        if await asyncio.to_thread(_is_directory, path):
            root = path
        else:
            root = await self._ready_unpacker().unpack(path)
        environment = await asyncio.to_thread(environment_at, root, path)
        version = await self._checked_version(environment, path)
        _logger.info("model '%s' runs on Python %s of %s", model, version, path)
        return environment

    async def close(self) -> None:
        """Stop what is being unpacked."""
        if self._unpacker is not None:
            await self._unpacker.close()

    def _ready_unpacker(self) -> Unpacker:
        if self._unpacker is None:
            store = open_store(self._cache)
            _logger.info("unpacked environments are kept in %s", store.cache)
            self._unpacker = Unpacker(store, self._limit)
        return self._unpacker

    async def _checked_version(self, environment: StubEnvironment, source: Path) -> str:
        """Return the interpreter's version; one that has not changed is not asked again."""
        status = await asyncio.to_thread(os.stat, environment.python)
        key = (environment.python, status.st_dev, status.st_ino, status.st_mtime_ns)
        version = self._checked.get(key)
        if version is None:
            version = self._checked[key] = await check_interpreter(environment, source)
        return version


def _is_directory(path: Path) -> bool:
    """Whether a path is a directory; what is none has to be an archive."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise BridgeError(
            f"Path {path} does not exist. The Python environment should contain an 'activate' "
            "script. (expected an environment with bin/python3 there, or an archive of one: "
            f"parameter {PARAMETER})",
            ErrorCode.INVALID_ARG,
        ) from error
    except OSError as error:
        raise BridgeError(
            f"{PARAMETER} {path} cannot be read: {error.strerror or error}", ErrorCode.INVALID_ARG
        ) from error
