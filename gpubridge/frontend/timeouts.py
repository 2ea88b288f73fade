"""Timeout rules of connections, and the sweeper that has them checked periodically.

The rules have no clock: callers pass the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Protocol

_BYTES_PER_SECOND = 500
_LONGEST = 1024
"""Seconds: a transfer that holds much memory must keep a rate that would fill it in this time."""

_LONGEST_PERIOD = 1.0
_SHORTEST_PERIOD = 0.02
_AT_ONCE = 64
"""Connections checked in one turn of the event loop, so that requests do not wait for all of them."""


def bytes_per_second(held: int = 0) -> int:
    """Return the minimum rate of a transfer that holds ``held`` bytes of memory."""
    return max(_BYTES_PER_SECOND, held // _LONGEST)


class MinimumRate:
    """Minimum rate of a transfer in each window of time; see `bytes_per_second`.

    ``window``: seconds; 0 for no minimum.
    """

    __slots__ = ("_nbytes", "_since", "_transfer", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._transfer: object = None
        self._since = 0.0
        self._nbytes = 0

    def too_slow(self, now: float, transfer: object, nbytes: int, held: int = 0) -> bool:
        """Return whether the window has passed without enough progress.

        - ``transfer``: the current transfer; a different one restarts the window. None for none.
        - ``nbytes``: bytes transferred so far.
        - ``held``: bytes of memory that the transfer holds.
        """
        if transfer is None or not self._window:
            self._transfer = None
            return False
        enough = self._window * bytes_per_second(held)
        if transfer != self._transfer or nbytes - self._nbytes >= enough:
            self._transfer, self._since, self._nbytes = transfer, now, nbytes
            return False
        return now - self._since >= self._window


class Deadline:
    """Maximum time in one state.

    ``seconds``: the limit; 0 for none.
    """

    __slots__ = ("_seconds", "_since", "_state")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._state: object = None
        self._since = 0.0

    def too_long(self, now: float, state: object) -> bool:
        """Return whether ``state``, or its equal, has lasted too long; None for no state."""
        if state is None or not self._seconds:
            self._state = None
            return False
        if state != self._state:
            self._state, self._since = state, now
            return False
        return now - self._since >= self._seconds


class SendStall:
    """Minimum rate at which a client reads what is sent to it.

    ``window``: seconds; 0 for no minimum.
    """

    __slots__ = ("_rate", "_transfer", "_unsent")

    def __init__(self, window: float) -> None:
        self._rate = MinimumRate(window)
        self._unsent = 0
        self._transfer: object = None

    def too_slow(self, now: float, unsent: int) -> bool:
        """Return whether the window has passed without enough progress."""
        if unsent > self._unsent:
            # Bytes were added, so the progress since the last check is unknown.
            self._transfer = object()
        self._unsent = unsent
        return self._rate.too_slow(now, self._transfer if unsent else None, -unsent, unsent)


class Sweepable(Protocol):
    """Object whose timeouts the sweeper checks."""

    def check(self, now: float) -> None:
        """Act on timeouts that have passed at ``now``, in seconds."""


class TimeoutSweeper:
    """Checks the timeouts of all connections periodically.

    ``times``: the timeouts in seconds, 0 for none. The period is a quarter of the shortest, at most
    a second.
    """

    def __init__(self, times: Collection[float]) -> None:
        shortest = min((time for time in times if time > 0), default=_LONGEST_PERIOD)
        self._period = max(_SHORTEST_PERIOD, min(_LONGEST_PERIOD, shortest / 4))
        self._groups: list[Collection[Sweepable]] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_later(self._period, self._sweep)

    def add(self, group: Collection[Sweepable]) -> None:
        """Check the members of a collection from now on; it may change."""
        self._groups.append(group)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _sweep(self) -> None:
        self._check(iter([each for group in self._groups for each in group]))

    def _check(self, rest: Iterator[Sweepable]) -> None:
        now = self._loop.time()
        # Scheduled first: an error in one check does not stop the others.
        self._timer = self._loop.call_soon(self._check, rest)
        for _ in range(_AT_ONCE):
            each = next(rest, None)
            if each is None:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._period, self._sweep)
                return
            each.check(now)
