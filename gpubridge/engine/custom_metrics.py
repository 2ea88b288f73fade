"""The metrics that models make: which families and series there are, and whose they are."""

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
from typing import TYPE_CHECKING, NamedTuple

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import Segment
from gpubridge.telemetry.exposition import Family, number_text
from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
    histogram_units,
)

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance

_BOARD_BYTES = 16 << 20
_REST_NS = 2_000_000_000
"""So long a unit rests before somebody else has it: a thread may be about to write to it."""

_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "gpubridge_")
_UNITS_OF_ONE = 1 << 15
"""Units of the board that one stub may have, so that one without bounds leaves room for others."""


class MetricMemory:
    """Hands out units of a board; owns its segment, of which pages are taken when they are used."""

    def __init__(self) -> None:
        self.segment = Segment.create(0, _BOARD_BYTES)
        self.board = MetricBoard(self.segment.view)
        # The first one is nobody's: links that lead nowhere say 0.
        self._next = 1
        self._resting: dict[int, deque[tuple[int, int]]] = {}

    def take(self, count: int) -> int:
        """Give so many units in a row, all zero; returns the first; raises BridgeError."""
        resting = self._resting.get(count)
        full = self._next + count > self.board.units
        if resting and (full or time.monotonic_ns() - resting[0][0] > _REST_NS):
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

    def give_back(self, unit: int, count: int) -> None:
        """Take units back."""
        self._resting.setdefault(count, deque()).append((time.monotonic_ns(), unit))

    def close(self) -> None:
        """Give the memory back."""
        self.board.close()
        self.segment.close()


class Series(ABC):
    """A series of any kind; owns the units of its cells.

    - ``units``: how many units a cell takes.
    - ``head``: the unit of the first cell, the server's own; 0 where there is none.
    - ``bounds``: upper bounds of a histogram's buckets, without infinity.
    """

    def __init__(self, labels: Mapping[str, str], memory: MetricMemory, units: int) -> None:
        self.labels = dict(labels)
        self.units = units
        self.head = 0
        self.bounds: Sequence[float] = ()
        self._memory = memory
        self._cells: list[int] = []
        self._heirs: weakref.WeakSet[Instance] = weakref.WeakSet()

    @property
    def shown(self) -> bool:
        """Return whether some stub has it."""
        return bool(self._cells)

    def wanted(self) -> bool:
        """Return whether some stub has it, or may have it again."""
        return bool(self._cells) or any(not heir.over for heir in self._heirs)

    def open(self) -> int:
        """Add a cell; returns its first unit."""
        unit = self._memory.take(self.units)
        self._cells.append(unit)
        return unit

    def close(self, unit: int, heir: Instance | None) -> None:
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


class OpenedCell(NamedTuple):
    """Place in which a stub counts: the series' head, its own cell, and the bounds of a histogram."""

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
        """Drop the series that nobody has or will have; returns whether the family is wanted."""
        for labels, series in list(self.series.items()):
            if not series.wanted():
                series.drop()
                del self.series[labels]
        return bool(self.members or self.series)


@dataclass(slots=True, eq=False)
class _Membership:
    """A stub's family object: what it has in the family of that name."""

    family: _Family
    cells: list[tuple[Series, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class MetricOwner:
    """Metrics of one stub.

    ``catch_up``: takes what the stub has said and is not heard yet.
    """

    heir: Instance
    catch_up: Callable[[], None]
    memberships: dict[int, _Membership] = field(default_factory=dict)
    units: int = 0


class CustomMetrics:
    """Knows the families of all models; owns the memory in which they count.

    A family or series is there as long as some stub has it. What a stub that died has counted in
    counters and histograms comes back when its instance's next process makes the same ones.
    """

    def __init__(self) -> None:
        self._memory: MetricMemory | None = None
        self._families: dict[str, _Family] = {}
        self._owners: set[MetricOwner] = set()

    def open_family(
        self, owner: MetricOwner, number: int, name: str, description: str, kind: str
    ) -> None:
        """Let a stub make a family, or join the one of that name; raises BridgeError."""
        if not _NAME.fullmatch(name):
            raise invalid("Invalid metric name")
        if name.startswith(_RESERVED):
            raise invalid(
                f"Invalid metric name: '{name}' begins like the server's own, with nv_ or gpubridge_"
            )
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
        """Let a stub make a metric of its family, or join the one with these labels.

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
            if owner.units + series.units > _UNITS_OF_ONE:
                raise unavailable(
                    f"expected at most {_UNITS_OF_ONE} metrics of one model instance, got one more; "
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
        """The memory in which they count; once there is a metric."""
        assert self._memory is not None
        return self._memory.segment

    def close_family(self, owner: MetricOwner, number: int) -> None:
        """A stub has deleted a family object."""
        self._close(owner, number, None)

    def leave(self, owner: MetricOwner) -> None:
        """A stub is gone."""
        heir = None if owner.heir.over else owner.heir
        for number in list(owner.memberships):
            self._close(owner, number, heir)
        self._owners.discard(owner)

    def _close(self, owner: MetricOwner, number: int, heir: Instance | None) -> None:
        membership = owner.memberships.pop(number, None)
        if membership is None:
            return
        family = membership.family
        for series, unit in membership.cells:
            series.close(unit, heir)
            owner.units -= series.units
        family.members -= 1
        if not family.forget_unwanted():
            del self._families[family.name]

    def families(self) -> Iterator[Family]:
        """Give what is on the metrics page."""
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
        """Give the memory back."""
        self._families.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _check_form(kind: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
    if not all(map(_LABEL.fullmatch, labels)) or (kind == "histogram" and "le" in labels):
        raise invalid("Invalid label name")
    if not all(low < high for low, high in pairwise(buckets)):
        raise invalid("Bucket Boundaries must be strictly sorted")
