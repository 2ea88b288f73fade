"""Prediction of short waits: for a message that is likely to come soon, polling pays.

To wake a sleeping processor takes as long as a small request takes altogether. Where one request
follows the other, both sides therefore look again and again for a moment before they sleep.
"""

from __future__ import annotations

import os
import select
import time

from gpubridge.tensor.native import native

_RUN = 8
"""So many waits in a row have to be short, each for a single request."""
_TAKEN_NS = 20_000
"""A yield of the processor that takes longer than this let another thread run."""
_CONTENDED_NS = 500_000
"""A yield that takes so long let other work run, not a client that soon waits for its answer."""
_PENALTY = 200
"""Waits for which a processor with other work is left alone."""
_MOST = 4 * _RUN
"""A longer run excuses no more waits that were spent awake in vain."""
_SHORT = 2
"""A wait is short that is up to so many times as long as one would stay awake: asleep it is longer."""


def busy_poll_ns(microseconds: int) -> int:
    """Return for how many nanoseconds to stay awake: 0 where there is no processor to spare."""
    return microseconds * 1000 if len(os.sched_getaffinity(0)) > 1 else 0


class ShortWaits:
    """Judges the next wait by the last ones; one would stay awake for ``awake_ns``, 0 for never.

    ``taken`` says whether others wanted the processor when one stayed awake last.
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
        """Begin to wait; returns whether that is likely to be short."""
        self._since = now
        self._waiting = True
        return self._run >= _RUN and self.alone

    @property
    def likely(self) -> bool:
        """Return whether the next wait is likely to be short."""
        return self._run >= _RUN

    def end(self, now: int) -> None:
        """Note that what was waited for is there."""
        self._waiting = False
        if now - self._since < self._limit:
            self._run = min(self._run + 1, _MOST)
        else:
            self._run = min(self._run, 0)

    def stay_awake(self, descriptor: int, nanoseconds: int) -> bool:
        """Look so long for something to read, offering the processor to others; return if it is."""
        readable, away = self._look(descriptor, nanoseconds, _TAKEN_NS)
        self.taken = away > _TAKEN_NS
        if away > _CONTENDED_NS:
            self._run = -_PENALTY
        return readable

    def give_up(self) -> None:
        """Note that one has stayed awake in vain: where that happens again and again, one sleeps."""
        if self._waiting:
            self._run -= _RUN

    def crowd(self) -> None:
        """Note that there is no waiting: work comes faster than it is done."""
        self._run = min(self._run, 0)


def _look(descriptor: int, nanoseconds: int, patience: int) -> tuple[bool, int]:
    """Do what the compiled module does faster."""
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
