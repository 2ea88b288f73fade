"""Prediction of short waits, which decides whether to poll for a message before sleeping.

Waking a sleeping processor takes as long as a small request. Where requests follow each other
closely, both sides therefore poll for a moment before they sleep.
"""

from __future__ import annotations

import os
import select
import time

from gpubridge.tensor.native import native

_RUN = 8
"""Polling begins after this many short waits in a row, each for a single request."""
_TAKEN_NS = 20_000
"""If sched_yield takes longer than this, another thread ran."""
_CONTENDED_NS = 500_000
"""If sched_yield takes longer than this, other work ran, not just the client of this request."""
_PENALTY = 200
"""Waits without polling after other work was found on the processor."""
_MOST = 4 * _RUN
"""Upper limit of the run, and so of the failed polls that it compensates."""
_SHORT = 2
"""A wait is short if it took less than this many times the polling time; sleeping prolongs waits."""


def busy_poll_ns(microseconds: int) -> int:
    """Return the nanoseconds to poll for: 0 on a single processor."""
    return microseconds * 1000 if len(os.sched_getaffinity(0)) > 1 else 0


class WaitPredictor:
    """Predicts from the last waits whether the next one is short.

    - ``awake_ns``: time to poll for; 0 for never.
    - ``alone``: whether one request is in flight at a time.
    - ``taken``: whether another thread used the processor during the last poll.
    """

    __slots__ = ("_limit", "_look", "_run", "_since", "_waiting", "alone", "taken")

    def __init__(self, awake_ns: int) -> None:
        self._limit = _SHORT * awake_ns
        self._since = 0
        self._run = 0
        self._waiting = False
        self.alone = True
        self.taken = False
        compiled = native()
        self._look = _look if compiled is None else compiled.stay_awake

    def begin(self, now: int) -> bool:
        """Begin a wait; returns whether it is likely to be short."""
        self._since = now
        self._waiting = True
        return self._run >= _RUN and self.alone

    @property
    def likely(self) -> bool:
        """Return whether the next wait is likely to be short."""
        return self._run >= _RUN

    def end(self, now: int) -> None:
        """End the wait."""
        self._waiting = False
        if now - self._since < self._limit:
            self._run = min(self._run + 1, _MOST)
        else:
            self._run = min(self._run, 0)

    def stay_awake(self, descriptor: int, nanoseconds: int) -> bool:
        """Poll a descriptor, yielding the processor; returns whether it is readable."""
        readable, away = self._look(descriptor, nanoseconds, _TAKEN_NS)
        self.taken = away > _TAKEN_NS
        if away > _CONTENDED_NS:
            self._run = -_PENALTY
        return readable

    def give_up(self) -> None:
        """Note that polling was in vain; repeated failures stop it."""
        if self._waiting:
            self._run -= _RUN

    def crowd(self) -> None:
        """Note that requests arrive faster than they are executed, so that there are no waits."""
        self._run = min(self._run, 0)


def _look(descriptor: int, nanoseconds: int, patience: int) -> tuple[bool, int]:
    """Poll a descriptor; as the compiled `stay_awake`."""
    looked = select.poll()
    if descriptor >= 0:
        looked.register(descriptor, select.POLLIN)
    before = time.monotonic_ns()
    end = before + nanoseconds
    while True:
        if looked.poll(0):
            return True, 0
        before = time.monotonic_ns()
        os.sched_yield()
        after = time.monotonic_ns()
        if after - before > patience or after >= end:
            return False, after - before
