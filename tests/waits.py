"""Waits for what nothing tells of, by looking again and again: of threads, of coroutines, and of models."""

import asyncio
import time
from collections.abc import Callable

__all__ = ["poll", "polling", "timers", "until"]

_PAUSE_SECONDS = 0.001
_LONG_PAUSE_SECONDS = 0.01
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.005, 0.1


def poll(condition: Callable[[], object], limit_seconds: float) -> bool:
    """Return whether a condition comes to hold within a time: it is looked at less and less often."""
    deadline = time.monotonic() + limit_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.25 * pause, _LAST_PAUSE_SECONDS)
    return True


def polling(condition: str) -> str:
    """Return a line of code with which another process, or a thread of it, looks until an expression is true."""
    return f"while not ({condition}): __import__('time').sleep({_LONG_PAUSE_SECONDS})"


def timers() -> list[asyncio.TimerHandle]:
    """Return what the running event loop is still to call at some time."""
    return [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]


async def until(condition: Callable[[], object], pause_seconds: float = _PAUSE_SECONDS) -> None:
    """Let others run until a condition holds: threads, too, unless the pause is 0.

    What never comes is ended by the limit of all tests.
    """
    while not condition():  # noqa: ASYNC110  (nothing else tells it)
        await asyncio.sleep(pause_seconds)
