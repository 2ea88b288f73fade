"""Metrics that models define: counted in shared memory, shown on the server's metrics page."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import NamedEnum, TritonModelException, text, wrong_type
from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
    histogram_units,
)

if TYPE_CHECKING:
    from gpubridge.pb_utils.host import Cell, MetricStore


class MetricKind(NamedEnum):
    """The kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


MetricKind.__module__ = "c_python_backend_utils"


class Metric:
    """One time series of a `MetricFamily`, which makes it and owns it.

    Any thread may use it. No method waits for the server.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_cell", "_instance", "_kind")

    _cell: Any
    _instance: str
    _kind: MetricKind

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.Metric: No constructor defined!")

    @classmethod
    def _of(cls, cell: Cell, kind: MetricKind, instance: str) -> Metric:
        metric = object.__new__(cls)
        metric._cell = cell
        metric._kind = kind
        metric._instance = instance
        return metric

    def increment(self, value: float) -> None:
        """Add to a counter or gauge.

        Parameters
        ----------
        value : float
            Not negative for a counter.

        Raises
        ------
        TritonModelException
            For a negative value of a counter, a histogram, or when the family is deleted.
        """
        amount = value if type(value) is float else _number(value)
        cell = self._cell
        if not amount >= 0.0 or self._kind == _HISTOGRAM or cell.closed:
            self._check_increment(amount)
        with cell.lock:
            cell.add(amount)

    def _check_increment(self, amount: float) -> None:
        if self._cell.closed:
            raise _deleted("increment")
        if self._kind == _HISTOGRAM:
            self._refuse("increment", "Increment")
        if self._kind == MetricKind.COUNTER:
            # Triton takes NaN, and the counter is nothing else from then on.
            raise self._failure(
                "increment",
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values.",
            )

    def set(self, value: float) -> None:
        """Set a gauge.

        Raises
        ------
        TritonModelException
            For other kinds, or when the family is deleted.
        """
        amount = _number(value)
        cell = self._cell
        if cell.closed:
            raise _deleted("set")
        if self._kind != MetricKind.GAUGE:
            self._refuse("set", "Set")
        with cell.lock:
            cell.set(amount)

    def observe(self, value: float) -> None:
        """Count a value in a histogram.

        Raises
        ------
        TritonModelException
            For other kinds, or when the family is deleted.
        """
        amount = _number(value)
        cell = self._cell
        if cell.closed:
            raise _deleted("observe")
        if self._kind != _HISTOGRAM:
            self._refuse("observe", "Observe")
        with cell.lock:
            cell.observe(amount)

    def value(self) -> float:
        """Return the value of a counter or gauge, summed over all processes that share this metric.

        Raises
        ------
        TritonModelException
            For a histogram, or when the family is deleted.
        """
        cell = self._cell
        if cell.closed:
            raise _deleted("get")
        if self._kind == _HISTOGRAM:
            self._refuse("get", "Value")
        total: float = cell.total()
        return total

    def _refuse(self, verb: str, operation: str) -> NoReturn:
        raise self._failure(
            verb, f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}"
        )

    def _failure(self, verb: str, why: str) -> TritonModelException:
        return TritonModelException(
            f"Failed to {verb} metric value: {_failure_text(self._instance, why)}"
        )


class MetricFamily:
    """Metrics of one name, which differ in their labels.

    Families of the same name appear as one on the metrics page, whichever models and instances
    define them: the first description stays, and metrics with the same labels are one metric. A
    family's metrics live as long as this object; counts of other processes in the same metrics stay.

    Parameters
    ----------
    name : str
        As it is to appear on the metrics page.
    description : str
    kind : MetricKind
        ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

    Raises
    ------
    TritonModelException
        For an invalid name, or one that a family of another kind has.
    """

    __module__ = "c_python_backend_utils"

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    _number: int | None = None

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        name = text(name, "name")
        description = text(description, "description")
        if not isinstance(kind, MetricKind):
            raise wrong_type("kind", "one of MetricFamily's kinds", kind)
        self._store = store = _store()
        self._kind = kind
        self._cells: dict[tuple[tuple[str, str], ...], Cell] = {}
        self._making = threading.Lock()
        try:
            self._number = store.open_family(name, description, kind.name.lower())
        except BridgeError as error:
            raise TritonModelException(
                f"Error when creating MetricFamily: {_failure_text(store.instance, error.message)}"
            ) from error

    def Metric(
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """Make a metric, or return the one with these labels.

        Parameters
        ----------
        labels : dict of str to str, optional
        buckets : list of float, optional
            Upper bounds, ascending, of a histogram's buckets; one without a bound is added. Those of
            the first metric with these labels stay.

        Raises
        ------
        TritonModelException
            For invalid labels, and for buckets that are missing, unsorted or not expected.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        bounds = self._bounds(buckets)
        named = _labels(labels or {}, self._store.instance)
        key = tuple(sorted(named.items()))
        number = self._number
        if number is None:
            raise _not_created(self._store.instance, "the 'MetricFamily' has been deleted")
        with self._making:
            cell = self._cells.get(key)
            if cell is None:
                try:
                    cell = self._store.open_metric(number, self._kind.name.lower(), named, bounds)
                except BridgeError as error:
                    raise _not_created(self._store.instance, error.message) from error
                self._cells[key] = cell
        return Metric._of(cell, self._kind, self._store.instance)

    def _bounds(self, buckets: Any) -> list[float] | None:
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind != MetricKind.HISTOGRAM:
            if buckets is not None:
                raise TritonModelException("Failed to create metric. Unexpected buckets found.")
            return None
        if buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        bounds = [_number(bound) for bound in buckets]
        # NaN fails this comparison, too.
        if not all(low < high for low, high in zip(bounds, [*bounds[1:], math.inf])):
            if bounds[-1:] == [math.inf] and bounds == sorted(set(bounds)):
                return bounds[:-1]
            raise _not_created(self._store.instance, "Bucket Boundaries must be strictly sorted")
        return bounds

    def __del__(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            for cell in self._cells.values():
                cell.close()
            self._store.close_family(number)


_HISTOGRAM = MetricKind.HISTOGRAM


def _store() -> MetricStore:
    server = host.current()
    return LocalMetrics() if server is None or server.metrics is None else server.metrics


def _number(value: Any) -> float:
    """Convert to float whatever Python does.

    Raises
    ------
    TypeError
        For anything else, an int that is too large included.
    """
    if isinstance(value, (str, bytes, bytearray)):
        raise wrong_type("value", "float", value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong_type("value", "float", value) from None


def _labels(labels: dict[Any, Any], instance: str) -> dict[str, str]:
    for name, value in labels.items():
        if not isinstance(name, str):
            raise TritonModelException(
                f"Failed to create metric. Names of labels must be strings, got {name!r}."
            )
        if not isinstance(value, str):
            raise _not_created(instance, "attempt to access JSON non-string as string")
    return dict(labels)


def _failure_text(instance: str, why: str) -> str:
    return f"Failed to process the request for model '{instance}', message: {why}"


def _not_created(instance: str, why: str) -> TritonModelException:
    return TritonModelException(f"Error when creating Metric: {_failure_text(instance, why)}")


def _deleted(verb: str) -> TritonModelException:
    return TritonModelException(
        f"Failed to {verb} metric value: Invalid metric operation as the corresponding "
        "'MetricFamily' has been deleted. The 'MetricFamily' object should be deleted AFTER its "
        "corresponding 'Metric' objects have been deleted."
    )


class LocalMetrics:
    """Metric store outside of a server: each metric has its own memory; names are not checked."""

    instance = ""

    def open_family(self, _name: str, _description: str, _kind: str) -> int:
        """Make a family."""
        return 0

    def open_metric(
        self, _family: int, kind: str, _labels: dict[str, str], buckets: list[float] | None
    ) -> Cell:
        """Make a metric."""
        units = 2 if buckets is None else histogram_units(buckets)
        board = MetricBoard(memoryview(bytearray(units * UNIT_BYTES)))
        if buckets is not None:
            return HistogramCell(board, 0, buckets)
        return (GaugeCell if kind == "gauge" else CounterCell)(board, 1, 1)

    def close_family(self, _family: int) -> None:
        """Do nothing: no server holds the family."""
