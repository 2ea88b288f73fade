"""The routes that load and unload models: answered when it is done, or has failed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, InternalError
from gpubridge.frontend.http.message import Exchange
from gpubridge.protocol.repository_control import read_load, read_unload

__all__ = ["CONTROL_PATH", "ControlHandler", "ControlTasks"]

CONTROL_PATH = re.compile(rb"/v2/repository/models/(?P<model>[^/]+)/(?P<action>load|unload)")

_logger = logging.getLogger(__name__)

_JSON = b"Content-Type: application/json\r\n"


class ControlTasks:
    """Work of the repository that clients wait for; holds its tasks until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], then: Callable[[BridgeError | None], None]
    ) -> None:
        """Do the work, then call ``then`` with its error, or None."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[BridgeError | None], None], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # The loop ends, and nobody is left to be told.
            return
        error = task.exception()
        if error is not None and not isinstance(error, BridgeError):
            _logger.error("a load or unload failed by a fault of the server", exc_info=error)
            error = InternalError(f"a fault of the server: {error!r}")
        then(error)


class ControlHandler:
    """Takes a request over HTTP to load or unload a model.

    Raises
    ------
    BridgeError
        When the server does not take such requests.
    """

    __slots__ = ("_action", "_body", "_exchange", "_name", "_repository", "_tasks")

    def __init__(
        self, repository: ModelRepository, tasks: ControlTasks, name: str, action: bytes
    ) -> None:
        repository.check_control()
        self._repository = repository
        self._tasks = tasks
        self._name = name
        self._action = action
        self._body = bytearray()
        self._exchange: Exchange | None = None

    def body_memory(self, nbytes: int) -> memoryview:
        """Give the body a place; models may be sent in it."""
        self._body = bytearray(nbytes)
        return memoryview(self._body)

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Begin what is asked for."""
        body, self._body = bytes(self._body), bytearray()
        self._exchange = exchange
        self._tasks.start(self._work(body), self._answer)

    def abort(self) -> None:
        """Nobody waits for the answer; what was begun goes on."""
        self._exchange = None

    async def _work(self, body: bytes) -> None:
        if self._action == b"load":
            # Many bytes in base64, perhaps: not on the event loop.
            config, files = await asyncio.to_thread(read_load, body)
            await self._repository.load(self._name, config, files)
        else:
            await self._repository.unload(self._name, dependents=read_unload(body))

    def _answer(self, error: BridgeError | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is not None:
            exchange.fail(error)
        else:
            exchange.respond(200, _JSON, b"", plain=True)
