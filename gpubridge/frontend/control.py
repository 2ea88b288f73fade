"""Control requests: bodies in private memory, and tasks whose results callers wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from gpubridge.dataplane import GrowingMemory, HttpExchange
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import BridgeError, invalid
from gpubridge.host_shm import Body
from gpubridge.host_shm.private_memory import PrivateMemory
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.settings import TraceSettings

CONTROL_BYTES = 4 << 20
"""Maximum size of a control request, over HTTP and gRPC."""

JSON = b"Content-Type: application/json\r\n"
PLAIN = b"Content-Type: text/plain\r\n"

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class ControlTasks:
    """Tasks of control requests; keeps each until it ends."""

    def __init__(self) -> None:
        self._tasks = TaskSet()

    def start(
        self, work: Coroutine[Any, Any, _T], then: Callable[[_T | BridgeError], None]
    ) -> None:
        """Run a coroutine, then call ``then`` with its result or its error."""
        self._tasks.start(work).add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[_T | BridgeError], None], task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            # The event loop is ending.
            return
        error = task.exception()
        then(request_error(cast(Exception, error)) if error else task.result())


async def is_ready(model: Model) -> bool:
    """Return whether a model's processes and its own ``is_ready`` say so; log the reason if not."""
    reasons: list[str] = []
    if model.ready:
        asked = await asyncio.gather(
            *(check.ask() for check in model.ready_checks()), return_exceptions=True
        )
        reasons = [str(answer) for answer in asked if answer is not None]
    else:
        reasons = _last_errors(model)[:1] or ["it is being unloaded"]
    for reason in reasons:
        _logger.warning("Model '%s' version %d is not ready: %s", model.name, model.version, reason)
    return not reasons


def _last_errors(model: Model) -> list[str]:
    """Return the errors of a model's instances, or of its members'."""
    errors = [instance.last_error for instance in model.instances if instance.last_error]
    return errors + [error for member in model.members for error in _last_errors(member)]


def check_traced(repository: ModelRepository, model: str) -> None:
    """Raise Triton's error if a model is not loaded; an empty name stands for the server."""
    if model and not repository.versions(model):
        raise invalid(f"Request for unknown model : {model}")


def trace_settings(
    repository: ModelRepository, model: str, changes: Mapping[str, Any]
) -> TraceSettings:
    """Change trace settings of a model or the server; return the resulting settings.

    Raises BridgeError: INVALID_ARG for wrong values, and for a model that is not loaded.
    """
    check_traced(repository, model)
    traces = repository.telemetry.traces
    if changes:
        traces.update(changes, model)
    return traces.settings(model)


class PrivateBody:
    """Receives the body of an HTTP request into private memory."""

    body = memoryview(b"")
    _private: PrivateMemory | None = None

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview | GrowingMemory:
        """Return memory for the body."""
        if body is None:
            self.body = memoryview(bytearray(nbytes))
            return self.body
        self._private = PrivateMemory(nbytes, body)
        return self._private.memory

    def grow(self, arrived: int) -> int:
        """Return how many bytes of a large body there is memory for."""
        assert self._private is not None
        return self._private.grow(arrived, len(self._private.memory))

    def whole_body(self) -> memoryview:
        """Return the complete body, which can no longer be refused for lack of memory."""
        if self._private is not None:
            self._private.complete()
            self.body = memoryview(self._private.memory)
        return self.body

    def release(self) -> None:
        """Drop the body and its charge; views keep the memory."""
        self.body = memoryview(b"")
        private, self._private = self._private, None
        if private is not None:
            private.close()

    def abort(self) -> None:
        """Drop the request: it will not be completed, or its client is gone."""
        self.release()


class Answer(NamedTuple):
    """Response over HTTP. ``plain`` ones are never compressed: as in Triton, all control responses."""

    body: bytes = b""
    fields: bytes = JSON
    status: int = 200
    plain: bool = True


class ControlCall(PrivateBody):
    """Handler of one control request.

    - ``answer``: returns the response to this call, or a coroutine that does; raises BridgeError.
    - ``tasks``: runs coroutines, which continue when the client disconnects.
    """

    def __init__(
        self,
        answer: Callable[[ControlCall], Answer | Coroutine[Any, Any, Answer]],
        tasks: ControlTasks,
        limit: float = CONTROL_BYTES,
    ) -> None:
        self._answer = answer
        self._tasks = tasks
        self._limit = limit
        self._exchange: HttpExchange | None = None

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview | GrowingMemory:
        """Return memory for the body; raises BridgeError: INVALID_ARG when it is too long."""
        if nbytes > self._limit:
            raise invalid(f"this path takes no body of {nbytes} bytes (at most {self._limit})")
        return super().body_memory(nbytes, body)

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Respond, now or when the coroutine ends; raises BridgeError."""
        self._exchange = exchange
        self.whole_body()
        try:
            answer = self._answer(self)
        except Exception:
            self.release()
            raise
        if isinstance(answer, Answer):
            self._respond(answer)
        else:
            self._tasks.start(answer, self._respond)

    def abort(self) -> None:
        """Drop the response; a running coroutine continues."""
        self._exchange = None
        super().abort()

    def _respond(self, answer: Answer | BridgeError) -> None:
        self.release()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if isinstance(answer, BridgeError):
            exchange.fail(answer)
        else:
            exchange.respond(answer.status, answer.fields, answer.body, plain=answer.plain)
