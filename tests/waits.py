"""Waits of coroutines for what nothing tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until"]

_PAUSE_SECONDS = 0.001


async def until(condition: Callable[[], object], pause_seconds: float = _PAUSE_SECONDS) -> None:
    """Let others run until a condition holds: threads, too, unless the pause is 0.

    What never comes is ended by the limit of all tests.
    """
    while not condition():  # noqa: ASYNC110  (nothing else tells it)
        await asyncio.sleep(pause_seconds)
