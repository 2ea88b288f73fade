"""Starts the instances of a model together: one completes its configuration while the others wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from gpubridge.errors import BridgeError

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 0.5
"""Those that fail for one reason do so at about one time: then only the load's own error tells it."""


async def start_all(
    instances: Sequence[Instance], completion: Completion | None
) -> list[BaseException]:
    """Start every instance; returns why those that failed did, in their order.

    It takes as long as the slowest one, which may be waiting for somebody's debugger: by then the log
    has long told that the model is not going to be loaded. When it is cancelled, nothing starts any
    more.
    """
    starts = [asyncio.ensure_future(instance.start(completion)) for instance in instances]
    try:
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        if not all(start.done() for start in starts):
            await asyncio.wait(starts, timeout=_GRACE_SECONDS)
            _tell(instances, starts)
        results = await asyncio.gather(*starts, return_exceptions=True)
    except asyncio.CancelledError:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        raise
    return [result for result in results if isinstance(result, BaseException)]


def _tell(instances: Sequence[Instance], starts: Sequence[asyncio.Future[None]]) -> None:
    """Log why instances did not start, if the load goes on although it is going to fail."""
    pairs = list(zip(instances, starts, strict=True))
    waiting = ", ".join(instance.name for instance, start in pairs if not start.done())
    if not waiting:
        return
    for instance, start in pairs:
        if start.done() and not start.cancelled() and (error := start.exception()) is not None:
            _logger.error(
                "instance '%s' failed to start, so its model will not be loaded (that is reported "
                "when these have ended their start, too: %s): %s",
                instance.name,
                waiting,
                error,
            )


class Completion:
    """One completion of one model's configuration, shared by its instances.

    The process of the first instance imports the model, completes the configuration, and waits until
    it is checked; then it initializes the same model. The other instances import it meanwhile.

    ``finish``: checks what the model made of the configuration (None: nothing), and gives every
    instance the settings that follow; raises BridgeError when it cannot be served.
    """

    def __init__(self, finish: Callable[[str | None], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        self._finish = finish
        self._returned: asyncio.Future[str | None] = loop.create_future()
        self._settled: asyncio.Future[None] = loop.create_future()
        _leave_unasked(self._settled)

    def returned(self, text: str | None) -> None:
        """The first instance's process says what its model made of the configuration."""
        if not self._returned.done():
            self._returned.set_result(text)

    async def settled(self, first: bool, started: asyncio.Future[None]) -> None:
        """Wait, for one instance, until the configuration is complete and its settings are there.

        - ``first``: whether it is the instance whose process completes the configuration.
        - ``started``: fails when the instance's process does.

        Raises BridgeError: why there is no configuration, or why this process failed before there
        was one.
        """
        work = asyncio.ensure_future(self._settle() if first else asyncio.shield(self._settled))
        _leave_unasked(work)
        _leave_unasked(started)
        try:
            await asyncio.wait([work, started], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await started
                raise BridgeError(
                    "the model's process was ready before its configuration was complete"
                )
            await work
        except BaseException as error:
            work.cancel()
            if first:
                self._give_up(error)
            raise

    async def _settle(self) -> None:
        await self._finish(await self._returned)
        self._settled.set_result(None)

    def _give_up(self, error: BaseException) -> None:
        """Tell the instances that wait that there will be no configuration."""
        if self._settled.done():
            return
        if isinstance(error, Exception):
            self._settled.set_exception(error)
        else:
            self._settled.cancel()


def _leave_unasked(future: asyncio.Future[None]) -> None:
    """Have nobody complain of an error in ``future`` that nobody asks for."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
