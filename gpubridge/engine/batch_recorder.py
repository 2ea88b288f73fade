"""Counts answered batches into a model's statistics."""

from __future__ import annotations

from gpubridge.engine.in_flight import COMES_BACK, STILL_OPEN
from gpubridge.request import CompletedBatch, CompletedRequest, InferRequest
from gpubridge.telemetry.latencies import LatencyWindow
from gpubridge.telemetry.statistics import ModelStatistics

__all__ = ["BatchRecorder"]


class BatchRecorder:
    """Turns the times of batches and of their requests into durations.

    Most batches are one request of batch size one: those of a message are summed up first, so that
    they cost a few additions each.
    """

    __slots__ = ("_open", "_statistics")

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        # The steps of the batches of requests that are not over.
        self._open: dict[InferRequest, tuple[int, int, int, int]] = {}

    def record_closed(self, closed: list[CompletedRequest], now: int) -> None:
        """Count requests that ended at ``now``, after their batch."""
        for request, reason in closed:
            if not request.batch_size:
                continue
            queued, *steps = self._open.pop(request)
            if reason:
                self._statistics.failed(reason, now - request.arrived)
            else:
                self._statistics.answered(
                    request.batch_size,
                    now - request.arrived,
                    queued,
                    (steps[0], steps[1], steps[2]),
                )
                if self._statistics.window is not None:
                    spent = now - request.arrived
                    self._statistics.window.observe(now, (spent, queued, *steps))

    def forget(self, request: InferRequest) -> None:
        """A request is lost: its stub died."""
        self._open.pop(request, None)

    def record(self, batches: list[CompletedBatch], now: int) -> None:
        """Count batches that were answered at ``now`` (CLOCK_MONOTONIC, ns)."""
        singles = copied = 0
        arrived = started = called = ended = 0
        for batch in batches:
            copied += batch.copied
            requests = batch.requests
            if batch.failures or len(requests) != 1 or requests[0].batch_size != 1:
                self._record(batch, now)
                continue
            singles += 1
            arrived += requests[0].arrived
            started += batch.started
            called += batch.called
            ended += batch.ended
        statistics = self._statistics
        if singles:
            answered = singles * now
            statistics.executed(
                singles,
                1,
                (singles, answered - arrived, started - arrived),
                (called - started, ended - called, answered - ended),
            )
        if statistics.window is not None:
            _observe(statistics.window, batches, now)
        if batches:
            statistics.last_ended_ns = batches[-1].ended
        if copied:
            statistics.copied(copied)

    def _record(self, batch: CompletedBatch, now: int) -> None:
        """Count one batch."""
        statistics = self._statistics
        done = size = spent = queued = going_on = 0
        steps = (batch.called - batch.started, batch.ended - batch.called, now - batch.ended)
        for request in batch.requests:
            if not request.batch_size:
                continue
            reason = batch.failures.get(request)
            if reason == STILL_OPEN:
                going_on += request.batch_size
                self._open[request] = (batch.started - request.arrived, *steps)
                continue
            # A run that the model wants repeated counts like any other.
            if reason is not None and reason != COMES_BACK:
                statistics.failed(reason, now - request.arrived)
                continue
            done += 1
            size += request.batch_size
            spent += now - request.arrived
            queued += batch.started - request.arrived
        if done or going_on:
            statistics.executed(1, size, (done, spent, queued), steps, going_on)


def _observe(window: LatencyWindow, batches: list[CompletedBatch], now: int) -> None:
    """Take the durations of each request that succeeded."""
    for batch in batches:
        steps = (batch.called - batch.started, batch.ended - batch.called, now - batch.ended)
        for request in batch.requests:
            if request.batch_size and request not in batch.failures:
                queued = batch.started - request.arrived
                window.observe(now, (now - request.arrived, queued, *steps))
