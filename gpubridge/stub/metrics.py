"""The model's metrics: the server creates them; this process counts in shared memory."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment
from gpubridge.stub.bls.client import BlsClient
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import close_all
from gpubridge.transport.metric_board import CounterCell, GaugeCell, HistogramCell, MetricBoard

if TYPE_CHECKING:
    from gpubridge.pb_utils.host import Cell


class MetricClient:
    """Requests metric families and metrics from the server; owns the mapping of the metric board."""

    def __init__(self, calls: BlsClient, instance: str) -> None:
        self.instance = instance
        self._calls = calls
        self._numbers = itertools.count(1)
        self._board: MetricBoard | None = None
        self._segment: Segment | None = None
        self._mapping = threading.Lock()
        self._cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self._process = os.getpid()

    def open_family(self, name: str, description: str, kind: str) -> int:
        """Make a family, or join the one of that name; returns its number. Raises BridgeError."""
        number = next(self._numbers)
        self._calls.ask("family", family=number, name=name, text=description, metric=kind)
        return number

    def open_metric(
        self, family: int, kind: str, labels: dict[str, str], buckets: list[float] | None
    ) -> Cell:
        """Make a metric, or join the one with these labels; raises BridgeError."""
        question = self._calls.ask("metric", family=family, labels=labels, buckets=buckets)
        answer = question.answer
        board = self._map(answer["size"], question.fds)
        cell: Cell
        if kind == "histogram":
            cell = HistogramCell(board, answer["unit"], answer["bounds"])
        else:
            made = GaugeCell if kind == "gauge" else CounterCell
            cell = made(board, answer["head"], answer["unit"])
        self._cells.add(cell)
        return cell

    def close_family(self, family: int) -> None:
        """Release a family; any thread, at any time."""
        if os.getpid() != self._process:
            return
        try:
            self._calls.tell(CallKind.CLOSE_FAMILY, family=family)
        except BridgeError:
            # The process ends.
            pass

    def close(self) -> None:
        """Send no more messages: the process ends."""
        self._process = 0

    def disown(self) -> None:
        """Count in private memory from now on: for a forked child."""
        for cell in list(self._cells):
            cell.detach()

    def _map(self, size: int, fds: list[int]) -> MetricBoard:
        with self._mapping:
            if self._board is None:
                self._segment = Segment.open(0, fds.pop(), size)
                self._board = MetricBoard(self._segment.view)
            close_all(fds)
            return self._board
