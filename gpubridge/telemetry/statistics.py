"""What one model version has done: the figures of the statistics extension and of the metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gpubridge.dataplane import ModelCounters
from gpubridge.telemetry.device_work import DeviceWork
from gpubridge.telemetry.latencies import LatencyHistogram, LatencyWindow

__all__ = ["FAILURE_REASONS", "BatchStatistics", "ModelStatistics"]

FAILURE_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
"""Triton's reasons for which a request fails, as they stand in its metrics."""


_NO_TAGS: Mapping[str, str] = MappingProxyType({})


class BatchStatistics(NamedTuple):
    """The executions with batches of one size; nanoseconds are sums over all of them."""

    executions: int
    input_ns: int
    infer_ns: int
    output_ns: int


class ModelStatistics(ModelCounters):
    """Counts for one model version, since it was loaded.

    What stubs answer is counted by the compiled module (`gpubridge.dataplane.ModelCounters`, which
    says what there is); here is what else the metrics tell of a model.

    Attributes
    ----------
    device_work : DeviceWork
        What the server did on GPUs for it.
    fallbacks : Counter of str
        How often the server took a slower way for it, by reason.
    labels : dict
        What tells its metrics from other models'.
    first_response : LatencyHistogram or None
        How long its first responses take, where that is wanted.
    """

    def __init__(
        self,
        model: str,
        version: int,
        tags: Mapping[str, str] = _NO_TAGS,
        window: LatencyWindow | None = None,
        first_response: LatencyHistogram | None = None,
    ) -> None:
        super().__init__()
        # The underscore is Triton's: a tag cannot be mistaken for a label of its own.
        self.labels = {
            **{f"_{key}": value for key, value in tags.items()},
            "model": model,
            "version": str(version),
        }
        self._window = window
        self.observes = window is not None
        self.first_response = first_response
        self.model = model
        self.version = version
        self.device_work = DeviceWork()
        self.fallbacks: Counter[str] = Counter()

    @property
    def window(self) -> LatencyWindow | None:
        """The durations of its latest requests, where quantiles of them are wanted."""
        if self._window is not None:
            for now, durations in self.take_observations():
                self._window.observe(now, durations)
        return self._window

    @property
    def batches(self) -> dict[int, BatchStatistics]:
        """The executions by batch size."""
        return {size: BatchStatistics(*row) for size, row in self.batch_rows.items()}

    @property
    def last_inference_ms(self) -> int:
        """Wall-clock milliseconds of the last execution's end; 0 before the first."""
        if not self.last_ended_ns:
            return 0
        return (time.time_ns() - time.monotonic_ns() + self.last_ended_ns) // 1_000_000

    @property
    def fail_count(self) -> int:
        """Requests that failed, for whatever reason."""
        return sum(self.failures.values())
