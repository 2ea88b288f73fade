"""The memory of the board of custom metrics: its units, handed out and taken back."""

from __future__ import annotations

import time
from collections import deque

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.transport.metric_board import UNIT_BYTES, MetricBoard

__all__ = ["MetricMemory"]

_BOARD_BYTES = 16 << 20
_REST_NS = 2_000_000_000
"""So long a unit rests before somebody else has it: a thread may be about to write to it."""


class MetricMemory:
    """Hands out units of a board; owns its segment, of which pages are taken when they are used.

    Attributes
    ----------
    board : MetricBoard
    segment : Segment
    """

    def __init__(self) -> None:
        self.segment = Segment.create(0, _BOARD_BYTES)
        self.board = MetricBoard(self.segment.view)
        # The first one is nobody's: links that lead nowhere say 0.
        self._next = 1
        self._resting: dict[int, deque[tuple[int, int]]] = {}

    def take(self, count: int) -> int:
        """Give so many units in a row, all zero; returns the first.

        Raises
        ------
        BridgeError
            UNAVAILABLE when there are none left.
        """
        resting = self._resting.get(count)
        full = self._next + count > self.board.units
        if resting and (full or time.monotonic_ns() - resting[0][0] > _REST_NS):
            unit = resting.popleft()[1]
        elif full:
            raise BridgeError(
                f"expected at most {_BOARD_BYTES // UNIT_BYTES} metrics in all, got one more; make "
                "fewer, with fewer different labels",
                ErrorCode.UNAVAILABLE,
            )
        else:
            unit = self._next
            self._next += count
        self.board.clear(unit, count)
        return unit

    def give_back(self, unit: int, count: int) -> None:
        """Take units back."""
        self._resting.setdefault(count, deque()).append((time.monotonic_ns(), unit))

    def close(self) -> None:
        """Give the memory back."""
        self.board.close()
        self.segment.close()
