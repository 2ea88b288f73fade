"""Limits of connections: how many there may be, and which ones are looked at for being late."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from gpubridge.dataplane import IdleConnections

_LONGEST_PERIOD = 1.0
_SHORTEST_PERIOD = 0.02
_AT_ONCE = 64
"""Connections looked at in one turn of the loop: requests do not wait for the rest."""

_CLOSABLE = 16
"""Idle connections that are looked at for one that can be closed."""

_logger = logging.getLogger(__name__)

_FOR_ALL_ELSE = 1024
"""Descriptors for models' processes, segments and files."""


def longest_idle(connections: IdleConnections) -> Any:
    """Return the connection that is idle for the longest time and has nothing unsent; None for none."""
    return next((each for each in connections.first(_CLOSABLE) if not each.unsent), None)


class Swept(Protocol):
    """Object that the sweeper checks."""

    def check(self, now: float) -> None:
        """See what has come to pass by ``now`` (seconds), and whether something is late."""


class Sweeper:
    """Looks at all connections again and again.

    ``times``: the time-outs that are kept, in seconds; 0 is none. They decide how often it looks:
    once a second, or so that none is kept much later than it says.
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


def allow_connections(limits: list[int], regions: int = 0) -> None:
    """Raise the process's limit of descriptors to what its endpoints may need; warn where that fails.

    - ``limits``: how many connections each endpoint may have; 0 is any number.
    - ``regions``: how many regions of shared memory clients may register.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    wanted = most if 0 in limits else sum(limits) + regions + _FOR_ALL_ELSE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
    if most < wanted:
        _logger.warning(
            "this process may open %d descriptors, fewer than the %d that its connections may need: "
            "raise the limit (ulimit -n), or lower --http-max-connections and "
            "--grpc-max-connections",
            most,
            wanted,
        )
