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
_CONTENDED_NS = 500_000
_PENALTY = 200
"""Waits without polling after other work was found on the processor."""
_MOST = 4 * _RUN
"""Upper limit of the run, and so of the failed polls that it compensates."""
_SHORT = 2
"""A wait is short if it took less than this many times the polling time; sleeping prolongs waits."""


def busy_poll_ns(microseconds: int) -> int:
    """Return the nanoseconds to poll for: 0 on a single processor."""
    return microseconds * 1000 if len(os.sched_getaffinity(0)) > 1 else 0


def wait_predictor(awake_ns: int) -> WaitPredictor:
    """Return a predictor of waits: the compiled one where the module is there."""
    compiled = native()
    return (WaitPredictor if compiled is None else compiled.WaitPredictor)(awake_ns)


class WaitPredictor:
    """Predicts from the last waits whether the next one is short; the compiled module has an equivalent class.

    - ``awake_ns``: time to poll for; 0 for never.
    - ``taken_ns``, ``contended_ns``: if sched_yield takes longer, another thread ran, or other work than the
      client of a request.
    - ``alone``: whether one request is in flight at a time.
    - ``taken``: whether another thread used the processor during the last poll.
    """

    __slots__ = (
        "_contended_ns",
        "_limit",
        "_run",
        "_since",
        "_taken_ns",
        "_waiting",
        "alone",
        "taken",
    )

    def __init__(
        self, awake_ns: int, taken_ns: int = _TAKEN_NS, contended_ns: int = _CONTENDED_NS
    ) -> None:
        self._limit = _SHORT * awake_ns
        self._taken_ns, self._contended_ns = taken_ns, contended_ns
        self._since = 0
        self._run = 0
        self._waiting = False
        self.alone = True
        self.taken = False

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
        readable, away = _look(descriptor, nanoseconds, self._taken_ns)
        self.taken = away > self._taken_ns
        if away > self._contended_ns:
            self._run = -_PENALTY
        return readable

    def poll(self, descriptor: int, nanoseconds: int) -> bool:
        """Poll as `stay_awake`; a wait that did not end meanwhile was in vain."""
        readable = self.stay_awake(descriptor, nanoseconds)
        if not (readable or self.taken):
            self.give_up()
        return readable

    def give_up(self) -> None:
        """Note that polling was in vain; repeated failures stop it."""
        if self._waiting:
            self._run -= _RUN

    def crowd(self) -> None:
        """Note that requests arrive faster than they are executed, so that there are no waits."""
        self._run = min(self._run, 0)


def _look(descriptor: int, nanoseconds: int, patience: int) -> tuple[bool, int]:
    """Poll a descriptor; return whether it is readable, and how long sched_yield took the last time."""
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
