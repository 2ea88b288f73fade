"""Keeps the event loop awake for a moment, where one request follows the other.

For as long as something is due in this turn, the loop asks the kernel for events without sleeping;
so nobody else's events wait. The processor is offered to whoever wants it each time.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop

from gpubridge.transport.short_waits import ShortWaits

_GLANCE_NS = 50_000
"""The loop has a turn, for its timers, after so long without an event."""


class BusyPoll:
    """Watches how long one stub and its clients take.

    ``awake_ns``: for how long to stay awake at most; 0 for never.
    """

    def __init__(self, loop: AbstractEventLoop, awake_ns: int) -> None:
        self._loop = loop
        self._events = descriptor_of_events(loop)
        self._glance_ns = 0 if self._events < 0 else _GLANCE_NS
        self._awake_ns = awake_ns
        self._answers = ShortWaits(awake_ns)
        self._requests = ShortWaits(awake_ns)
        self._waits = self._answers
        self._until = 0
        self._on = False

    def sent(self, alone: bool) -> bool:
        """A batch goes to the stub; ``alone``: that had nothing else to do.

        Returns: whether the next is likely to follow, alone too, soon after this is answered.
        """
        if not alone:
            self._requests.crowd()
            return False
        now = time.monotonic_ns()
        self._requests.end(now)
        if self._answers.begin(now):
            self._stay_awake(now, self._answers)
        return self._requests.likely

    def told(self) -> None:
        """The stub has what it waited for, and goes on with its batch."""
        now = time.monotonic_ns()
        if self._answers.begin(now):
            self._stay_awake(now, self._answers)

    def heard(self) -> None:
        """The stub has said something, and waits now itself."""
        self._answers.end(time.monotonic_ns())

    def answered(self) -> None:
        """The stub has answered all that it had."""
        now = time.monotonic_ns()
        self._answers.end(now)
        if self._requests.begin(now):
            self._stay_awake(now, self._requests)

    def _stay_awake(self, now: int, waits: ShortWaits) -> None:
        self._waits = waits
        self._until = now + self._awake_ns
        if not self._on:
            self._on = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        left = self._until - time.monotonic_ns()
        self._on = left > 0
        if self._on:
            # Of a client, which may have several threads that need a processor, only one look each turn.
            glance = self._glance_ns if self._waits is self._answers else 0
            self._waits.stay_awake(self._events, min(left, glance))
            # Whoever wanted the processor is to have it, and not to share it with who only waits.
            self._on = not self._waits.taken
        else:
            self._waits.give_up()
        if self._on:
            self._loop.call_soon(self._turn)


def descriptor_of_events(loop: AbstractEventLoop) -> int:
    """Return what is readable when the loop has events; -1 where it does not say."""
    # uvloop's; to look at it costs a third of a turn of the loop.
    backend = getattr(loop, "_get_backend_id", None)
    return -1 if backend is None else int(backend())
