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
from gpubridge.frontend.small_body import PrivateBody
from gpubridge.protocol.repository_control import read_load, read_unload

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


class ControlHandler(PrivateBody):
    """Takes a request over HTTP to load or unload a model.

    Raises BridgeError when the server does not take such requests.
    """

    __slots__ = ("_action", "_exchange", "_name", "_repository", "_tasks")

    def __init__(
        self, repository: ModelRepository, tasks: ControlTasks, name: str, action: bytes
    ) -> None:
        super().__init__()
        repository.check_control()
        self._repository = repository
        self._tasks = tasks
        self._name = name
        self._action = action
        self._exchange: Exchange | None = None

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Begin what is asked for."""
        self._exchange = exchange
        self._tasks.start(self._work(self.whole_body()), self._answer)

    def abort(self) -> None:
        """Nobody waits for the answer; what was begun goes on."""
        self._exchange = None
        super().abort()

    async def _work(self, body: memoryview) -> None:
        if self._action == b"load":
            # Many bytes in base64, perhaps: not on the event loop.
            config, files = await asyncio.to_thread(lambda: read_load(bytes(body)))
            self.release()
            await self._repository.load(self._name, config, files)
        else:
            await self._repository.unload(self._name, dependents=read_unload(bytes(body)))

    def _answer(self, error: BridgeError | None) -> None:
        self.release()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is not None:
            exchange.fail(error)
        else:
            exchange.respond(200, _JSON, b"", plain=True)
