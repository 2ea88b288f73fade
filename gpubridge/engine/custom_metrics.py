"""Custom metrics of models: families, series, and the stubs that use them."""

from __future__ import annotations

import math
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import Segment
from gpubridge.telemetry.exposition import Family, number_text
from gpubridge.telemetry.own_metrics import is_own
from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
    histogram_units,
)

_BOARD_BYTES = 16 << 20
_REUSE_DELAY_NS = 2_000_000_000
"""Delay before a freed unit is reused: a thread of a stub may be about to write to it."""

_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_UNITS_PER_STUB = 1 << 15
"""Limit of units for one stub, so that a stub that leaks metrics does not exhaust the board."""


class StubOwner(Protocol):
    """Owner of a stub, which starts another one when that has died."""

    @property
    def ended(self) -> bool:
        """Return whether it starts none any more."""


class MetricMemory:
    """Allocator of units of a metric board; owns its shared memory."""

    def __init__(self) -> None:
        self.segment = Segment.create(0, _BOARD_BYTES)
        self.board = MetricBoard(self.segment.view)
        # Unit 0 is never allocated: 0 ends a linked list.
        self._next = 1
        self._freed: dict[int, deque[tuple[int, int]]] = {}

    def allocate(self, count: int) -> int:
        """Allocate ``count`` consecutive zeroed units; return the first; raises BridgeError."""
        resting = self._freed.get(count)
        full = self._next + count > self.board.units
        if resting and (full or time.monotonic_ns() - resting[0][0] > _REUSE_DELAY_NS):
            unit = resting.popleft()[1]
        elif full:
            raise unavailable(
                f"expected at most {_BOARD_BYTES // UNIT_BYTES} metrics in all, got one more; make "
                "fewer, with fewer different labels"
            )
        else:
            unit = self._next
            self._next += count
        self.board.clear(unit, count)
        return unit

    def free(self, unit: int, count: int) -> None:
        """Free units."""
        self._freed.setdefault(count, deque()).append((time.monotonic_ns(), unit))

    def close(self) -> None:
        """Release the memory."""
        self.board.close()
        self.segment.close()


class Series(ABC):
    """A series of any kind; owns the units of its cells, one cell for each stub.

    - ``units``: number of units of a cell.
    - ``head``: the unit of the first cell, the server's own; 0 if there is none.
    - ``bounds``: upper bounds of a histogram's buckets, without infinity.
    """

    def __init__(self, labels: Mapping[str, str], memory: MetricMemory, units: int) -> None:
        self.labels = dict(labels)
        self.units = units
        self.head = 0
        self.bounds: Sequence[float] = ()
        self._memory = memory
        self._cells: list[int] = []
        self._successors: weakref.WeakSet[StubOwner] = weakref.WeakSet()

    @property
    def shown(self) -> bool:
        """Return whether a stub has a cell of it."""
        return bool(self._cells)

    def wanted(self) -> bool:
        """Return whether a stub has a cell of it, or may create one again after a restart."""
        return bool(self._cells) or any(not instance.ended for instance in self._successors)

    def open(self) -> int:
        """Add a cell; return its first unit."""
        unit = self._memory.allocate(self.units)
        self._cells.append(unit)
        return unit

    def close(self, unit: int, instance: StubOwner | None) -> None:
        """Remove a cell; its counts are kept while the series exists.

        ``instance``: the instance whose stub died and will be restarted, else None.
        """
        self._cells.remove(unit)
        if instance is not None and self._survives_restart():
            self._successors.add(instance)
        self._keep(unit)
        self._memory.free(unit, self.units)

    def drop(self) -> None:
        """Free the remaining units."""

    def _survives_restart(self) -> bool:
        return True

    @abstractmethod
    def _keep(self, unit: int) -> None: ...

    @abstractmethod
    def show(self, family: Family) -> None:
        """Add its samples to the metrics page."""


class ScalarSeries(Series):
    """A counter or a gauge."""

    def __init__(self, labels: Mapping[str, str], memory: MetricMemory, *, gauge: bool) -> None:
        super().__init__(labels, memory, 1)
        self._kind = GaugeCell if gauge else CounterCell
        self.head = memory.allocate(1)
        self._total = self._kind(memory.board, self.head, self.head)

    def open(self) -> int:
        """Add a cell; return its unit."""
        unit = super().open()
        board = self._memory.board
        board.change(self.head)
        self._link()
        board.change(self.head)
        return unit

    def drop(self) -> None:
        """Free the server's own cell."""
        self._memory.free(self.head, 1)

    def _survives_restart(self) -> bool:
        # A gauge of a dead process has no meaning.
        return self._kind is CounterCell

    def _keep(self, unit: int) -> None:
        board = self._memory.board
        board.change(self.head)
        self._link()
        self._total.absorb(self._kind(board, self.head, unit))
        board.change(self.head)

    def _link(self) -> None:
        units = [self.head, *self._cells, 0]
        # From the last cell to the first, so that concurrent readers find each cell.
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


class OpenedCell(NamedTuple):
    """The cell of a stub: the series' head, the cell's unit, and the bounds of a histogram."""

    head: int
    unit: int
    bounds: Sequence[float]


@dataclass(slots=True, eq=False)
class _Family:
    """A family and its series, by their labels; owns the series."""

    name: str
    description: str
    kind: str
    members: int = 0
    series: dict[tuple[tuple[str, str], ...], Series] = field(default_factory=dict)

    def forget_unwanted(self) -> bool:
        """Drop unused series; return whether the family is still used."""
        for labels, series in list(self.series.items()):
            if not series.wanted():
                series.drop()
                del self.series[labels]
        return bool(self.members or self.series)


@dataclass(slots=True, eq=False)
class _Membership:
    """A stub's family object and its cells in the family."""

    family: _Family
    cells: list[tuple[Series, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class MetricOwner:
    """Metrics of one stub.

    - ``instance``: the instance of the stub.
    - ``catch_up``: handles the messages that the stub has sent.
    """

    instance: StubOwner
    catch_up: Callable[[], None]
    memberships: dict[int, _Membership] = field(default_factory=dict)
    units: int = 0


class CustomMetrics:
    """The metric families of all models; owns their shared memory.

    A family or series exists while a stub uses it. Counters and histograms of a dead stub continue
    when its instance's next stub creates them again.
    """

    def __init__(self) -> None:
        self._memory: MetricMemory | None = None
        self._families: dict[str, _Family] = {}
        self._owners: set[MetricOwner] = set()

    def open_family(
        self, owner: MetricOwner, number: int, name: str, description: str, kind: str
    ) -> None:
        """Create a family for a stub, or add the stub to the family of that name; raises BridgeError."""
        if not _NAME.fullmatch(name):
            raise invalid("Invalid metric name")
        if is_own(name):
            raise invalid(f"Invalid metric name: '{name}' is that of a metric of the server")
        family = self._families.get(name)
        if family is not None and not family.forget_unwanted():
            family = None
        if family is None:
            family = self._families[name] = _Family(name, description, kind)
        elif family.kind != kind:
            raise invalid("Family name already exists with different type")
        elif not family.members:
            family.description = description
        family.members += 1
        owner.memberships[number] = _Membership(family)
        self._owners.add(owner)

    def open_metric(
        self,
        owner: MetricOwner,
        number: int,
        labels: Mapping[str, str],
        buckets: Sequence[float] | None,
    ) -> OpenedCell:
        """Create a metric in a stub's family, or add a cell to the one with these labels.

        Raises BridgeError: INVALID_ARG in Triton's words; UNAVAILABLE when there are too many.
        """
        membership = owner.memberships[number]
        family = membership.family
        _check_form(family.kind, labels, buckets or ())
        key = tuple(sorted(labels.items()))
        series = family.series.get(key)
        if series is not None and not series.wanted():
            series.drop()
            series = None
        made = series is None
        if series is None:
            series = self._new_series(family.kind, labels, buckets or ())
        try:
            if owner.units + series.units > _UNITS_PER_STUB:
                raise unavailable(
                    f"expected at most {_UNITS_PER_STUB} metrics of one model instance, got one more; "
                    "make fewer, with fewer different labels"
                )
            unit = series.open()
        except BridgeError:
            if made:
                series.drop()
            raise
        family.series[key] = series
        owner.units += series.units
        membership.cells.append((series, unit))
        return OpenedCell(series.head, unit, series.bounds)

    def _new_series(self, kind: str, labels: Mapping[str, str], buckets: Sequence[float]) -> Series:
        if self._memory is None:
            self._memory = MetricMemory()
        if kind == "histogram":
            return HistogramSeries(labels, self._memory, buckets)
        return ScalarSeries(labels, self._memory, gauge=kind == "gauge")

    @property
    def segment(self) -> Segment:
        """Return the shared memory; call after the first `open_metric`."""
        assert self._memory is not None
        return self._memory.segment

    def close_family(self, owner: MetricOwner, number: int) -> None:
        """Handle the deletion of a family object in a stub."""
        self._close(owner, number, None)

    def leave(self, owner: MetricOwner) -> None:
        """Remove the metrics of a dead stub."""
        instance = None if owner.instance.ended else owner.instance
        for number in list(owner.memberships):
            self._close(owner, number, instance)
        self._owners.discard(owner)

    def _close(self, owner: MetricOwner, number: int, instance: StubOwner | None) -> None:
        membership = owner.memberships.pop(number, None)
        if membership is None:
            return
        family = membership.family
        for series, unit in membership.cells:
            series.close(unit, instance)
            owner.units -= series.units
        family.members -= 1
        if not family.forget_unwanted():
            del self._families[family.name]

    def families(self) -> Iterator[Family]:
        """Yield the families for the metrics page."""
        for owner in list(self._owners):
            owner.catch_up()
        for family in list(self._families.values()):
            if not family.forget_unwanted():
                del self._families[family.name]
                continue
            shown = Family(family.name, family.description, family.kind)
            for series in family.series.values():
                if series.shown:
                    series.show(shown)
            yield shown

    def close(self) -> None:
        """Release the memory."""
        self._families.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _check_form(kind: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
    if not all(map(_LABEL.fullmatch, labels)) or (kind == "histogram" and "le" in labels):
        raise invalid("Invalid label name")
    if not all(low < high for low, high in pairwise(buckets)):
        raise invalid("Bucket Boundaries must be strictly sorted")
