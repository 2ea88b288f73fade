"""Counts answered batches into a model's statistics."""

from __future__ import annotations

from gpubridge.engine.link import Landed
from gpubridge.request import InferRequest
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.messages import Batch

__all__ = ["BatchRecorder"]


class BatchRecorder:
    """Turns the times of batches and of their requests into durations.

    Most batches are one request of batch size one: those of a message are summed up first, so that
    they cost a few additions each.
    """

    __slots__ = ("_statistics",)

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics

    def record(self, landed: list[Landed], now: int) -> None:
        """Count batches that were answered at ``now`` (CLOCK_MONOTONIC, ns)."""
        singles = copied = 0
        arrived = started = called = ended = 0
        for batch, requests, failures in landed:
            copied += batch.copied
            if failures or len(requests) != 1 or requests[0].batch_size != 1:
                self._record(batch, requests, failures, now)
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
        statistics.last_ended_ns = landed[-1][0].ended if landed else statistics.last_ended_ns
        if copied:
            statistics.copied(copied)

    def _record(
        self,
        batch: Batch,
        requests: list[InferRequest],
        failures: dict[InferRequest, str],
        now: int,
    ) -> None:
        """Count one batch."""
        statistics = self._statistics
        done = size = spent = queued = 0
        for request in requests:
            if not request.batch_size:
                continue
            if request in failures:
                statistics.failed(failures[request], now - request.arrived)
                continue
            done += 1
            size += request.batch_size
            spent += now - request.arrived
            queued += batch.started - request.arrived
        if done:
            statistics.executed(
                1,
                size,
                (done, spent, queued),
                (batch.called - batch.started, batch.ended - batch.called, now - batch.ended),
            )
