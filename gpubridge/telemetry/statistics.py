"""What one model version has done: the figures of the statistics extension and of the metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from gpubridge.telemetry.device_work import DeviceWork
from gpubridge.telemetry.latencies import LatencyHistogram, LatencyWindow

__all__ = ["FAILURE_REASONS", "BatchStatistics", "ModelStatistics"]

FAILURE_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
"""Triton's reasons for which a request fails, as they stand in its metrics."""


_NO_TAGS: Mapping[str, str] = MappingProxyType({})


class BatchStatistics:
    """The executions with batches of one size; nanoseconds are sums over all of them."""

    __slots__ = ("executions", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.executions = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0


class ModelStatistics:
    """Counts for one model version, since it was loaded.

    Durations are Triton's: of every request from its arrival at the model to its answer; queueing,
    then the three steps of the execution it was part of. Their counts are ``success_count``.

    Attributes
    ----------
    inferences : int
        Requests, each counted with its batch size.
    executions : int
        Calls of ``execute``.
    last_ended_ns : int
        CLOCK_MONOTONIC nanoseconds of the last execution's end; 0 before the first.
    failures : dict
        Requests by reason.
    batches : dict
        By batch size.
    copied_bytes, copies : int
        Tensor data that the bridge itself copied in host memory, server and stub together.
    device_work : DeviceWork
        What the server did on GPUs for it.
    fallbacks : Counter of str
        How often the server took a slower way for it, by reason.
    labels : dict
        What tells its metrics from other models'.
    window : LatencyWindow or None
        The durations of its latest requests, where quantiles of them are wanted.
    first_response : LatencyHistogram or None
        How long its first responses take, where that is wanted.
    """

    __slots__ = (
        "batches",
        "copied_bytes",
        "copies",
        "device_work",
        "executions",
        "fail_ns",
        "failures",
        "fallbacks",
        "first_response",
        "infer_ns",
        "inferences",
        "input_ns",
        "labels",
        "last_ended_ns",
        "model",
        "output_ns",
        "queue_ns",
        "success_count",
        "success_ns",
        "version",
        "window",
    )

    def __init__(
        self,
        model: str,
        version: int,
        tags: Mapping[str, str] = _NO_TAGS,
        window: LatencyWindow | None = None,
        first_response: LatencyHistogram | None = None,
    ) -> None:
        # The underscore is Triton's: a tag cannot be mistaken for a label of its own.
        self.labels = {
            **{f"_{key}": value for key, value in tags.items()},
            "model": model,
            "version": str(version),
        }
        self.window = window
        self.first_response = first_response
        self.model = model
        self.version = version
        self.inferences = self.executions = self.last_ended_ns = 0
        self.success_count = self.success_ns = self.fail_ns = 0
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.batches: dict[int, BatchStatistics] = {}
        self.copied_bytes = self.copies = 0
        self.device_work = DeviceWork()
        self.fallbacks: Counter[str] = Counter()

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

    def copied(self, nbytes: int) -> None:
        """Count a copy of tensor data."""
        if nbytes:
            self.copied_bytes += nbytes
            self.copies += 1

    def failed(self, reason: str, spent_ns: int) -> None:
        """Count a request that failed after ``spent_ns``."""
        self.failures[reason] += 1
        self.fail_ns += spent_ns

    def executed(
        self,
        executions: int,
        size: int,
        requests: tuple[int, int, int],
        steps: tuple[int, int, int],
        going_on: int = 0,
    ) -> None:
        """Count executions of one batch size.

        Parameters
        ----------
        size : int
            The sum of the batch sizes of the requests of one execution.
        requests : (int, int, int)
            How many requests succeeded in all of them, the same number in each; nanoseconds of all
            of them from arrival to answer, and in the queue.
        steps : (int, int, int)
            Nanoseconds of input, execute and output, summed over the executions.
        going_on : int
            The sum of the batch sizes of the requests that are not over yet: :meth:`answered` counts
            them.
        """
        done, spent_ns, queue_ns = requests
        input_ns, infer_ns, output_ns = steps
        # Every request of an execution spends the same time in its steps.
        each = done // executions
        self.executions += executions
        self.inferences += executions * size
        self.success_count += done
        self.success_ns += spent_ns
        self.queue_ns += queue_ns
        self.input_ns += each * input_ns
        self.infer_ns += each * infer_ns
        self.output_ns += each * output_ns
        batch = self.batches.get(size + going_on)
        if batch is None:
            batch = self.batches[size + going_on] = BatchStatistics()
        batch.executions += executions
        batch.input_ns += input_ns
        batch.infer_ns += infer_ns
        batch.output_ns += output_ns

    def answered(
        self, size: int, spent_ns: int, queue_ns: int, steps: tuple[int, int, int]
    ) -> None:
        """Count a request that ended well some time after its execution.

        Parameters
        ----------
        size : int
            Its batch size.
        spent_ns, queue_ns : int
            From arrival to the last response; in the queue.
        steps : (int, int, int)
            Nanoseconds of input, execute and output of its execution.
        """
        self.inferences += size
        self.success_count += 1
        self.success_ns += spent_ns
        self.queue_ns += queue_ns
        self.input_ns += steps[0]
        self.infer_ns += steps[1]
        self.output_ns += steps[2]
