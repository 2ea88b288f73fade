"""Whether a model is ready: as its processes are, and as it says itself where it has a say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gpubridge.engine.model import Model
from gpubridge.engine.ready_check import ReadyCheck
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.http.message import Exchange
from gpubridge.frontend.small_body import SmallBody

_logger = logging.getLogger(__name__)

_PLAIN = b"Content-Type: text/plain\r\n"
_asking: set[asyncio.Task[None]] = set()


def tell_ready(model: Model, then: Callable[[bool], None]) -> None:
    """Find out whether a model is ready; ``then`` is told, at once if nobody has to be asked."""
    if not model.ready:
        reasons = [i.last_error for i in model.instances if i.last_error]
        _tell_why(model, reasons[0] if reasons else "it is being unloaded")
        then(False)
        return
    checks = model.ready_checks()
    if not checks:
        then(True)
        return
    task = asyncio.get_running_loop().create_task(_ask(model, checks, then))
    # The loop alone would not keep it alive.
    _asking.add(task)
    task.add_done_callback(_asking.discard)


async def _ask(model: Model, checks: Sequence[ReadyCheck], then: Callable[[bool], None]) -> None:
    answers = await asyncio.gather(*(check.ask() for check in checks), return_exceptions=True)
    for answer in answers:
        if answer is not None:
            _tell_why(model, str(answer))
    then(not any(answers))


def _tell_why(model: Model, reason: str) -> None:
    _logger.warning("Model '%s' version %d is not ready: %s", model.name, model.version, reason)


class ModelReadyHandler(SmallBody):
    """Takes a request over HTTP that asks whether a model is ready.

    ``find``: returns the model; raises BridgeError where there is none.
    """

    __slots__ = ("_exchange", "_find")

    def __init__(self, find: Callable[[], Model]) -> None:
        super().__init__()
        self._find = find
        self._exchange: Exchange | None = None

    def answer(self, exchange: Exchange) -> None:
        """Answer, when the model has."""
        self._exchange = exchange
        try:
            model = self._find()
        except BridgeError:
            self._answer(False)
        else:
            tell_ready(model, self._answer)

    def abort(self) -> None:
        """Nobody waits for the answer."""
        self._exchange = None
        super().abort()

    def _answer(self, ready: bool) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if ready:
            exchange.respond(200, _PLAIN, b"")
        else:
            exchange.fail(invalid("Model version not ready"))
