"""Metrics of a model that runs outside of a server, in a test say: counted, and shown nowhere."""

from __future__ import annotations

from gpubridge.pb_utils.metrics import Cell
from gpubridge.transport.metric_board import (
    UNIT_BYTES,
    CounterCell,
    GaugeCell,
    HistogramCell,
    MetricBoard,
    histogram_units,
)

__all__ = ["LocalMetrics"]


class LocalMetrics:
    """Gives each family memory of its own; names are not checked."""

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
        """There is nobody to tell."""
