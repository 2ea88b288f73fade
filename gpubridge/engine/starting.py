"""Starts the instances of a model together, and tells at once why one of them cannot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpubridge.engine.completion import Completion
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
