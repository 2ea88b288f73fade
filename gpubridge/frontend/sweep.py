"""One coarse timer for all connections: each is looked at now and then, instead of timers of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Protocol

__all__ = ["Sweeper", "Swept"]

_LONGEST_PERIOD = 1.0
_SHORTEST_PERIOD = 0.02
_AT_ONCE = 64
"""Connections looked at in one turn of the loop: requests do not wait for the rest."""


class Swept(Protocol):
    """What is looked at."""

    def check(self, now: float) -> None:
        """See what has come to pass by ``now`` (seconds), and whether something is late."""


class Sweeper:
    """Looks at all connections again and again.

    Parameters
    ----------
    times : iterable of float
        The time-outs that are kept, in seconds; 0 is none. They decide how often it looks: once a
        second, or so that none is kept much later than it says.
    """

    def __init__(self, times: Collection[float]) -> None:
        shortest = min((time for time in times if time > 0), default=_LONGEST_PERIOD)
        self._period = max(_SHORTEST_PERIOD, min(_LONGEST_PERIOD, shortest / 4))
        self._groups: list[Collection[Swept]] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_later(self._period, self._sweep)

    def add(self, group: Collection[Swept]) -> None:
        """Look at what is in a collection from now on; it may change."""
        self._groups.append(group)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _sweep(self) -> None:
        self._look(iter([each for group in self._groups for each in group]))

    def _look(self, rest: Iterator[Swept]) -> None:
        now = self._loop.time()
        # Whatever goes wrong with one, the others are looked at.
        self._timer = self._loop.call_soon(self._look, rest)
        for _ in range(_AT_ONCE):
            each = next(rest, None)
            if each is None:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._period, self._sweep)
                return
            each.check(now)
