"""Concurrent start of a model's instances; the first one completes the configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gpubridge.errors import BridgeError

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 0.5
"""Instances that fail within this time of the first fail for one reason; only the load logs it."""


class StartedInstance(Protocol):
    """An instance that `start_all` starts."""

    @property
    def name(self) -> str:
        """Its name."""

    async def start(self, completion: ConfigCompletion | None) -> None:
        """Start it; raises BridgeError."""


async def start_all(
    instances: Sequence[StartedInstance], completion: ConfigCompletion | None
) -> list[BaseException]:
    """Start every instance; return the errors of those that failed, in order.

    Waits for the slowest instance, which may wait for a debugger; failures of the others are logged
    before. Cancelling this cancels all starts.
    """
    starts = [asyncio.ensure_future(instance.start(completion)) for instance in instances]
    try:
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        if not all(start.done() for start in starts):
            await asyncio.wait(starts, timeout=_GRACE_SECONDS)
            _log_failures(instances, starts)
        results = await asyncio.gather(*starts, return_exceptions=True)
    except asyncio.CancelledError:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        raise
    return [result for result in results if isinstance(result, BaseException)]


def _log_failures(
    instances: Sequence[StartedInstance], starts: Sequence[asyncio.Future[None]]
) -> None:
    """Log failed starts while other instances of a load that must fail are still starting."""
    pairs = list(zip(instances, starts, strict=True))
    waiting = ", ".join(instance.name for instance, start in pairs if not start.done())
    if not waiting:
        return
    for instance, start in pairs:
        if start.done() and not start.cancelled() and (error := start.exception()) is not None:
            _logger.error(
                "instance '%s' failed to start, so its model will not be loaded (the load fails once "
                "these instances have ended their start: %s): %s",
                instance.name,
                waiting,
                error,
            )


class ConfigCompletion:
    """Completion of a model's configuration (``auto_complete_config``), shared by its instances.

    The stub of the first instance imports the model, completes the configuration, and waits until it
    is checked; then it initializes the same model. The other instances import the model meanwhile.

    ``finish``: checks the completed configuration (None: unchanged) and configures every instance;
    raises BridgeError when it cannot be served.
    """

    def __init__(self, finish: Callable[[str | None], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        self._finish = finish
        self._returned: asyncio.Future[str | None] = loop.create_future()
        self._completed: asyncio.Future[None] = loop.create_future()
        _ignore_exception(self._completed)

    def returned(self, text: str | None) -> None:
        """Store the configuration that the first instance's model returned."""
        if not self._returned.done():
            self._returned.set_result(text)

    async def wait_completed(self, first: bool, started: asyncio.Future[None]) -> None:
        """Wait until the configuration is complete and an instance has its settings.

        - ``first``: whether the instance completes the configuration.
        - ``started``: fails when the instance's process ends.

        Raises BridgeError: why the completion or the process failed.
        """
        work = asyncio.ensure_future(self._complete() if first else asyncio.shield(self._completed))
        _ignore_exception(work)
        _ignore_exception(started)
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
                self._fail(error)
            raise

    async def _complete(self) -> None:
        await self._finish(await self._returned)
        self._completed.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Fail the waiting instances."""
        if self._completed.done():
            return
        if isinstance(error, Exception):
            self._completed.set_exception(error)
        else:
            self._completed.cancel()


def _ignore_exception(future: asyncio.Future[None]) -> None:
    """Mark an exception of ``future`` as retrieved, so that asyncio does not log it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
