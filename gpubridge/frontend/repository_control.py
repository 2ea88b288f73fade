"""The routes that load and unload models: answered when it is done, or has failed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError
from gpubridge.frontend.http.message import Exchange
from gpubridge.protocol.repository_control import read_load, read_unload

__all__ = ["CONTROL_PATH", "ControlHandler", "ControlTasks"]

CONTROL_PATH = re.compile(rb"/v2/repository/models/(?P<model>[^/]+)/(?P<action>load|unload)")

_JSON = b"Content-Type: application/json\r\n"


class ControlTasks:
    """Work of the repository that clients wait for; holds its tasks until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], then: Callable[[BridgeError | None], None]
    ) -> None:
        """Do the work, then call ``then`` with its error, or None."""
        task = asyncio.get_running_loop().create_task(_outcome(work, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _outcome(
    work: Coroutine[Any, Any, None], then: Callable[[BridgeError | None], None]
) -> None:
    try:
        await work
    except BridgeError as error:
        then(error)
    else:
        then(None)


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
        """Begin what is asked for.

        Raises
        ------
        BridgeError
            When the body cannot be read.
        """
        repository, body = self._repository, bytes(self._body)
        if self._action == b"load":
            config, files = read_load(body)
            work = repository.load(self._name, config, files)
        else:
            work = repository.unload(self._name, dependents=read_unload(body))
        self._body = bytearray()
        self._exchange = exchange
        self._tasks.start(work, self._answer)

    def abort(self) -> None:
        """Nobody waits for the answer; what was begun goes on."""
        self._exchange = None

    def _answer(self, error: BridgeError | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is not None:
            exchange.fail(error)
        else:
            exchange.respond(200, _JSON, b"", plain=True)
