"""Batches that are counted: also those with a place that no request fills."""

from __future__ import annotations

from gpubridge.engine.batch_recorder import BatchRecorder
from gpubridge.engine.in_flight import STILL_OPEN
from gpubridge.request import CompletedBatch, InferRequest
from gpubridge.telemetry.statistics import ModelStatistics


def request(batch_size):
    return InferRequest(b"", None, 0, (), lambda _: None, batch_size=batch_size)


def test_a_place_that_no_request_fills_may_end_after_its_batch():
    statistics = ModelStatistics("m", 1)
    recorder = BatchRecorder(statistics)
    members = [request(1), request(0)]
    going_on = dict.fromkeys(members, STILL_OPEN)
    recorder.record([CompletedBatch(1, 1, 2, 3, 0, members, going_on)], 4)
    recorder.record_closed([(member, "") for member in reversed(members)], 5)
    assert (statistics.inferences, statistics.executions) == (1, 1)
