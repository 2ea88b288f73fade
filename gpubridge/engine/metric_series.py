"""One time series of a custom metric: the cells of all who count in it, and what is left of others."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpubridge.engine.metric_memory import MetricMemory
from gpubridge.telemetry.exposition import Family, number_text
from gpubridge.transport.metric_board import (
    CounterCell,
    GaugeCell,
    HistogramCell,
    histogram_units,
)

__all__ = ["Heir", "HistogramSeries", "ScalarSeries", "Series"]


class Heir(Protocol):
    """An instance: its next process may go on where the one before ended.

    Attributes
    ----------
    over : bool
        Whether there will be no other process.
    """

    @property
    def over(self) -> bool:
        """Whether there will be no other process."""


class Series:
    """What the kinds have in common; owns the cells' units.

    Attributes
    ----------
    labels : dict of str to str
    units : int
        How many units a cell takes.
    head : int
        The unit of the first cell, the server's own; 0 where there is none.
    bounds : sequence of float
        Upper bounds of a histogram's buckets, without infinity.
    """

    def __init__(self, labels: Mapping[str, str], memory: MetricMemory, units: int) -> None:
        self.labels = dict(labels)
        self.units = units
        self.head = 0
        self.bounds: Sequence[float] = ()
        self._memory = memory
        self._cells: list[int] = []
        self._heirs: weakref.WeakSet[Heir] = weakref.WeakSet()

    @property
    def shown(self) -> bool:
        """Whether somebody has it."""
        return bool(self._cells)

    def wanted(self) -> bool:
        """Whether somebody has it, or may have it again."""
        return bool(self._cells) or any(not heir.over for heir in self._heirs)

    def open(self) -> int:
        """Add a cell; returns its first unit."""
        unit = self._memory.take(self.units)
        self._cells.append(unit)
        return unit

    def close(self, unit: int, heir: Heir | None) -> None:
        """Remove a cell; what was counted in it stays, as long as somebody has the series.

        With ``heir`` its process has died, and the next one goes on.
        """
        self._cells.remove(unit)
        if heir is not None and self._inherited():
            self._heirs.add(heir)
        self._keep(unit)
        self._memory.give_back(unit, self.units)

    def drop(self) -> None:
        """Give back what is left of it."""

    def _inherited(self) -> bool:
        return True

    def _keep(self, unit: int) -> None:
        raise NotImplementedError

    def show(self, family: Family) -> None:
        """Add its samples to the metrics page."""
        raise NotImplementedError


class ScalarSeries(Series):
    """A counter or a gauge."""

    def __init__(self, labels: Mapping[str, str], memory: MetricMemory, *, gauge: bool) -> None:
        super().__init__(labels, memory, 1)
        self._kind = GaugeCell if gauge else CounterCell
        self.head = memory.take(1)
        self._total = self._kind(memory.board, self.head, self.head)

    def open(self) -> int:
        """Add a cell; returns its unit."""
        unit = super().open()
        board = self._memory.board
        board.change(self.head)
        self._link()
        board.change(self.head)
        return unit

    def drop(self) -> None:
        """Give back the server's own cell."""
        self._memory.give_back(self.head, 1)

    def _inherited(self) -> bool:
        # What a gauge says of a process is true no more when that is gone.
        return self._kind is CounterCell

    def _keep(self, unit: int) -> None:
        board = self._memory.board
        board.change(self.head)
        self._link()
        self._total.absorb(self._kind(board, self.head, unit))
        board.change(self.head)

    def _link(self) -> None:
        units = [self.head, *self._cells, 0]
        # From the last one on: whoever walks along meanwhile finds each of them.
        for index in range(len(units) - 2, -1, -1):
            self._memory.board.link(units[index], units[index + 1])

    def show(self, family: Family) -> None:
        """Add its value to the metrics page."""
        family.add(self.labels, self._total.total())


class HistogramSeries(Series):
    """A histogram."""

    def __init__(
        self, labels: Mapping[str, str], memory: MetricMemory, bounds: Sequence[float]
    ) -> None:
        super().__init__(labels, memory, histogram_units(bounds))
        self.bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def _cell(self, unit: int) -> HistogramCell:
        return HistogramCell(self._memory.board, unit, self.bounds)

    def _keep(self, unit: int) -> None:
        cell = self._cell(unit)
        self._counts = [kept + more for kept, more in zip(self._counts, cell.counts(), strict=True)]
        self._sum += cell.sum()

    def show(self, family: Family) -> None:
        """Add its count, its sum and its buckets to the metrics page."""
        cells = [self._cell(unit) for unit in self._cells]
        counts = [
            sum(column)
            for column in zip(self._counts, *(cell.counts() for cell in cells), strict=True)
        ]
        family.add(self.labels, sum(counts), "_count")
        family.add(self.labels, self._sum + sum(cell.sum() for cell in cells), "_sum")
        reached = 0
        for bound, count in zip([*self.bounds, math.inf], counts, strict=True):
            reached += count
            family.add({**self.labels, "le": number_text(bound)}, reached, "_bucket")
