"""Metric board: shared memory in which models count custom metrics, and which the server reads.

The server makes one segment, which every stub with metrics maps. The server allocates its units of 64
bytes and links them; unit 0 is unused. A time series has a *cell* for each stub that counts in it,
and a head cell of the server with the amounts of ended stubs. Only one process writes to each cell,
so that counting needs neither locks between processes nor messages. Map of a cell (8 bytes each)::

    0   u64  next      unit of the series' next cell, 0 for none           server writes
    1   u64  epoch     number of the latest ``set``, times 2, plus the index of the valid amount
    2   f64  amount, amount
    4   u64  version   of a head: odd while its series' cells change         server writes

A counter is the sum of its cells. A gauge is the sum of the cells with the latest epoch: ``set`` begins
a new epoch, which discards earlier amounts. A histogram is the sum of cells of this form, each in as
many units as it needs::

    0   f64  sum
    1   u64  count of each bucket, the last one for values beyond all bounds
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from threading import RLock

UNIT_BYTES = 64
_WORDS = UNIT_BYTES // 8
_EPOCH = 1
_AMOUNT = 2
_VERSION = 4
_COUNTS = 1
_LONGEST_SERIES = 4096
_LOOKS = 8


class MetricBoard:
    """Numbers of a board by their index, as u64 (``words``) and as f64 (``amounts``).

    ``memory``: ``units`` of 64 bytes, which the caller owns.
    """

    __slots__ = ("amounts", "units", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = memory.cast("Q")
        self.amounts = memory.cast("d")
        self.units = memory.nbytes // UNIT_BYTES

    def clear(self, unit: int, count: int) -> None:
        """Write zeros to ``count`` units."""
        for index in range(unit * _WORDS, (unit + count) * _WORDS):
            self.words[index] = 0

    def link(self, unit: int, following: int) -> None:
        """Set the next cell of a cell in its series; 0 for none."""
        self.words[unit * _WORDS] = following

    def change(self, head: int) -> None:
        """Mark the begin or the end of a change to the cells of a series."""
        self.words[head * _WORDS + _VERSION] += 1

    def close(self) -> None:
        """Release the memory."""
        self.words.release()
        self.amounts.release()


class _Cell:
    """Base class of cells: a lock for the threads of this process, and `closed`."""

    __slots__ = ("__weakref__", "_amounts", "_at", "_board", "_words", "closed", "lock")

    def __init__(self, board: MetricBoard, unit: int) -> None:
        self._board = board
        self._words = board.words
        self._amounts = board.amounts
        self._at = unit * _WORDS
        # Reentrant: a finalizer that counts may run while this thread has the lock.
        self.lock = RLock()
        self.closed = False

    def close(self) -> None:
        """Stop counting: the unit is reused."""
        self.closed = True


class CounterCell(_Cell):
    """A counter's cell: this process writes to ``unit``, of the series that begins at ``head``."""

    __slots__ = ("_head",)

    def __init__(self, board: MetricBoard, head: int, unit: int) -> None:
        super().__init__(board, unit)
        self._head = head * _WORDS

    def add(self, amount: float) -> None:
        """Count."""
        self._amounts[self._at + _AMOUNT] += amount

    def total(self) -> float:
        """Return the value of the series: the sum over all processes."""
        total = 0.0
        for _ in range(_LOOKS):
            version = self._words[self._head + _VERSION]
            total, seen = self._look()
            if seen and not version & 1 and self._words[self._head + _VERSION] == version:
                break
            # Another process is changing it.
            time.sleep(0)
        return total

    def _look(self) -> tuple[float, bool]:
        """Return the value of the series, and whether it is a consistent snapshot."""
        return sum(self._amounts[at + _AMOUNT] for at in self._series()), True

    def absorb(self, cell: CounterCell) -> None:
        """Add the amount of a cell that was removed from the series."""
        self.add(cell._amounts[cell._at + _AMOUNT])

    def detach(self) -> None:
        """Count in private memory from now on: for a forked child, which must not write here."""
        alone = MetricBoard(memoryview(bytearray(2 * UNIT_BYTES)))
        alone.amounts[_WORDS + _AMOUNT] = self.total()
        self._board, self._words, self._amounts = alone, alone.words, alone.amounts
        self._head = self._at = _WORDS
        self.lock = RLock()

    def _series(self) -> Iterator[int]:
        """Yield the offsets of the series' cells; ends even if the links form a cycle."""
        words = self._words
        at = self._head
        end = self._board.units * _WORDS
        for _ in range(_LONGEST_SERIES):
            yield at
            at = words[at] * _WORDS
            if not 0 < at < end:
                return


class GaugeCell(CounterCell):
    """A gauge's cell."""

    __slots__ = ()

    def add(self, amount: float) -> None:
        """Add to the value, whichever process has set it."""
        latest = self._latest()
        own = self._words[self._at + _EPOCH]
        if own >> 1 == latest:
            self._amounts[self._at + _AMOUNT + (own & 1)] += amount
        else:
            self._publish(latest, amount)

    def set(self, value: float) -> None:
        """Set the value, which discards earlier amounts."""
        latest = self._latest()
        # The unit in the lowest bits: processes that set at the same time get different epochs.
        low = (self._at // _WORDS) & 0xFF
        epoch = time.monotonic_ns() & ~0xFF | low
        if epoch <= latest:
            epoch = ((latest >> 8) + 1) << 8 | low
        self._publish(epoch, value)

    def _look(self) -> tuple[float, bool]:
        latest = self._latest()
        cells = [self._read(at) for at in self._series()]
        total = sum(amount for epoch, amount in cells if epoch == latest)
        # Otherwise it was set meanwhile, perhaps in a cell that was read before.
        return total, self._latest() == latest

    def absorb(self, cell: CounterCell) -> None:
        """Add the valid amount of a cell that was removed from the series."""
        epoch, amount = self._read(cell._at)
        if epoch < self._latest():
            return
        there, kept = self._read(self._at)
        self._publish(epoch, amount + kept if there == epoch else amount)

    def _latest(self) -> int:
        return max(self._words[at + _EPOCH] >> 1 for at in self._series())

    def _publish(self, epoch: int, amount: float) -> None:
        """Change epoch and amount atomically: write the unused amount, then switch to it."""
        which = ~self._words[self._at + _EPOCH] & 1
        self._amounts[self._at + _AMOUNT + which] = amount
        self._words[self._at + _EPOCH] = epoch << 1 | which

    def _read(self, at: int) -> tuple[int, float]:
        """Return a consistent pair of a cell's epoch and amount."""
        words, amounts = self._words, self._amounts
        epoch, amount = words[at + _EPOCH], 0.0
        for _ in range(_LOOKS):
            amount = amounts[at + _AMOUNT + (epoch & 1)]
            now = words[at + _EPOCH]
            if now == epoch:
                break
            epoch = now
        return epoch >> 1, amount


class HistogramCell(_Cell):
    """A histogram's cell; ``unit`` is its first, ``bounds`` ascend and end before infinity."""

    __slots__ = ("_bounds",)

    def __init__(self, board: MetricBoard, unit: int, bounds: Sequence[float]) -> None:
        super().__init__(board, unit)
        self._bounds = tuple(bounds)

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        # NaN is beyond all bounds.
        bucket = bisect_left(self._bounds, value) if value == value else len(self._bounds)
        self._words[self._at + _COUNTS + bucket] += 1
        self._amounts[self._at] += value

    def counts(self) -> list[int]:
        """Return the count of each bucket."""
        first = self._at + _COUNTS
        return list(self._words[first : first + len(self._bounds) + 1])

    def sum(self) -> float:
        """Return the sum of all values."""
        return self._amounts[self._at]

    def detach(self) -> None:
        """Count in private memory from now on: for a forked child, which must not write here."""
        alone = MetricBoard(memoryview(bytearray(histogram_units(self._bounds) * UNIT_BYTES)))
        self._board, self._words, self._amounts = alone, alone.words, alone.amounts
        self._at = 0
        self.lock = RLock()


def histogram_units(bounds: Sequence[float]) -> int:
    """Return the number of units of a histogram's cell."""
    return -(-(_COUNTS + len(bounds) + 1) // _WORDS)
