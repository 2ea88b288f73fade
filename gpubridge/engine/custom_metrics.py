"""The metrics that models make: which families and series there are, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from gpubridge.engine.metric_memory import MetricMemory
from gpubridge.engine.metric_series import Heir, HistogramSeries, ScalarSeries, Series
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.telemetry.exposition import Family

__all__ = ["CustomMetrics", "MetricOwner", "OpenedCell"]

_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("nv_", "gpubridge_")
_UNITS_OF_ONE = 1 << 15
"""What one stub may have of the board, so that one without bounds leaves room for others."""


class OpenedCell(NamedTuple):
    """Where a stub counts: the series' head, its own cell, and the bounds of a histogram."""

    head: int
    unit: int
    bounds: Sequence[float]


class _Family:
    """A family and its series, by their labels; owns the series."""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.members = 0
        self.series: dict[tuple[tuple[str, str], ...], Series] = {}

    def forget_unwanted(self) -> bool:
        """Drop the series that nobody has or will have; returns whether the family is wanted."""
        for labels, series in list(self.series.items()):
            if not series.wanted():
                series.drop()
                del self.series[labels]
        return bool(self.members or self.series)


class _Membership:
    """A stub's family object: what it has in the family of that name."""

    __slots__ = ("cells", "family")

    def __init__(self, family: _Family) -> None:
        self.family = family
        self.cells: list[tuple[Series, int]] = []


class MetricOwner:
    """What one stub has of the metrics.

    Parameters
    ----------
    heir : Heir
        Whose process the stub is.
    catch_up : callable
        Takes what the stub has said and is not heard yet.
    """

    __slots__ = ("catch_up", "heir", "memberships", "units")

    def __init__(self, heir: Heir, catch_up: Callable[[], None]) -> None:
        self.heir = heir
        self.catch_up = catch_up
        self.memberships: dict[int, _Membership] = {}
        self.units = 0


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
        """Let a stub make a family, or join the one of that name.

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words.
        """
        if not _NAME.fullmatch(name):
            raise _invalid("Invalid metric name")
        if name.startswith(_RESERVED):
            raise _invalid(
                f"Invalid metric name: '{name}' begins like the server's own, with nv_ or gpubridge_"
            )
        family = self._families.get(name)
        if family is not None and not family.forget_unwanted():
            family = None
        if family is None:
            family = self._families[name] = _Family(name, description, kind)
        elif family.kind != kind:
            raise _invalid("Family name already exists with different type")
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

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words; UNAVAILABLE when there are too many.
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
                raise BridgeError(
                    f"expected at most {_UNITS_OF_ONE} metrics of one model instance, got one more; "
                    "make fewer, with fewer different labels",
                    ErrorCode.UNAVAILABLE,
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

    def _close(self, owner: MetricOwner, number: int, heir: Heir | None) -> None:
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
        raise _invalid("Invalid label name")
    if not all(low < high for low, high in pairwise(buckets)):
        raise _invalid("Bucket Boundaries must be strictly sorted")


def _invalid(message: str) -> BridgeError:
    return BridgeError(message, ErrorCode.INVALID_ARG)
