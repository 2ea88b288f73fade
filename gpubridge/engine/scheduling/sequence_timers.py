"""When sequences are over by the clock: idle for too long, or too long without a slot."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from gpubridge.engine.scheduling.sequence_item import Sequence

__all__ = ["SequenceTimers"]


class SequenceTimers:
    """One timer per sequence at most: it rings early and is set anew, rather than kept up to date.

    Parameters
    ----------
    idle_ns : int
        How long a sequence with a slot may have nothing queued and nothing in flight; 0 for ever.
    """

    def __init__(self, idle_ns: int) -> None:
        self._idle_ns = idle_ns
        self._heap: list[tuple[int, int, Sequence]] = []
        self._serial = 0

    def watch(self, sequence: Sequence) -> None:
        """See to it that a sequence is looked at in time; to be called when its time is set."""
        end = self._end(sequence)
        if end and not 0 < sequence.watched <= end:
            self._serial += 1
            sequence.watched = end
            heapq.heappush(self._heap, (end, self._serial, sequence))

    def next(self) -> int:
        """Return when the next sequence is over, in ns; 0 for never."""
        heap = self._heap
        while heap:
            when, _, sequence = heap[0]
            if when == sequence.watched:
                if self._end(sequence) == when:
                    return when
                sequence.watched = 0
            heapq.heappop(heap)
            if not sequence.watched:
                self.watch(sequence)
        return 0

    def due(self, now_ns: int) -> Iterator[Sequence]:
        """Go through the sequences that are over; each must be ended before the next is asked for."""
        while 0 < self.next() <= now_ns:
            sequence = heapq.heappop(self._heap)[2]
            sequence.watched = 0
            yield sequence

    def _end(self, sequence: Sequence) -> int:
        """Return when a sequence is over if nothing happens; 0 for never."""
        if sequence.closed:
            return 0
        if sequence.instance < 0:
            return sequence.deadline
        if sequence.busy or not self._idle_ns:
            return 0
        return sequence.idle_since + self._idle_ns
