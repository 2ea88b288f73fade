"""Time limits and idle memory, looked after for as long as the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpubridge.engine.model import Model
from gpubridge.engine.regions import Regions

__all__ = ["keep_house"]

_TICK_SECONDS = 5.0
_IDLE_SECONDS = 30.0


async def keep_house(
    running: Callable[[], Iterable[Model]], limit: float | None, regions: Regions
) -> None:
    """Enforce time limits and give idle memory back, until cancelled.

    Parameters
    ----------
    running : callable
        Returns the models that may have requests.
    limit : float or None
        Seconds that one ``execute`` may take.
    """
    tick = _TICK_SECONDS if limit is None else min(_TICK_SECONDS, max(limit / 8, 0.02))
    clock = asyncio.get_running_loop().time
    due = clock() + _TICK_SECONDS
    while True:
        await asyncio.sleep(tick)
        models = list(running())
        if limit is not None:
            for model in models:
                model.check_time_limit()
        if clock() >= due:
            due = clock() + _TICK_SECONDS
            for model in models:
                model.housekeep()
            regions.trim(_IDLE_SECONDS)
