"""Busy polling: keeps the event loop awake for a moment between short messages.

While a callback is scheduled, the loop polls for events without sleeping; events of other
connections are handled as usual. Each iteration yields the processor to other threads.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop

from gpubridge.transport.wait_predictor import WaitPredictor

_GLANCE_NS = 50_000
"""Longest wait inside one iteration, so that the loop's timers run."""


class BusyPoll:
    """Learns how long one stub and its clients take, and polls if that is short.

    ``awake_ns``: longest time to poll; 0: never.
    """

    def __init__(self, loop: AbstractEventLoop, awake_ns: int) -> None:
        self._loop = loop
        self._events = descriptor_of_events(loop)
        self._glance_ns = 0 if self._events < 0 else _GLANCE_NS
        self._awake_ns = awake_ns
        self._answers = WaitPredictor(awake_ns)
        self._requests = WaitPredictor(awake_ns)
        self._waits = self._answers
        self._until = 0
        self._on = False

    def sent(self, alone: bool) -> bool:
        """Record a batch sent to the stub; ``alone``: the stub was idle.

        Returns whether the next batch is likely to follow soon after the response, alone again.
        """
        if not alone:
            self._requests.crowd()
            return False
        now = time.monotonic_ns()
        self._requests.end(now)
        if self._answers.begin(now):
            self._stay_awake(now, self._answers)
        return self._requests.likely

    def resumed(self) -> None:
        """Record that the stub continues its batch: it got the response to its BLS call."""
        now = time.monotonic_ns()
        if self._answers.begin(now):
            self._stay_awake(now, self._answers)

    def paused(self) -> None:
        """Record a message by which the stub pauses: it waits for a BLS call."""
        self._answers.end(time.monotonic_ns())

    def answered(self) -> None:
        """Record that the stub has completed all its batches."""
        now = time.monotonic_ns()
        self._answers.end(now)
        if self._requests.begin(now):
            self._stay_awake(now, self._requests)

    def _stay_awake(self, now: int, waits: WaitPredictor) -> None:
        self._waits = waits
        self._until = now + self._awake_ns
        if not self._on:
            self._on = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        left = self._until - time.monotonic_ns()
        self._on = left > 0
        if self._on:
            # A client may need the processor for several threads: poll once per iteration only.
            glance = self._glance_ns if self._waits is self._answers else 0
            self._waits.stay_awake(self._events, min(left, glance))
            # Another thread wanted the processor: stop polling.
            self._on = not self._waits.taken
        else:
            self._waits.give_up()
        if self._on:
            self._loop.call_soon(self._turn)


def descriptor_of_events(loop: AbstractEventLoop) -> int:
    """Return a descriptor that is readable when the loop has events; -1 if unknown."""
    # uvloop has one; polling it costs a third of an iteration.
    backend = getattr(loop, "_get_backend_id", None)
    return -1 if backend is None else int(backend())
