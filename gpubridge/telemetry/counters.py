"""Counters of the work done, per model, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["METRICS_CONTENT_TYPE", "ModelCounters", "ModelState", "metrics_page"]

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ModelCounters:
    """What one model version has done since it was loaded.

    Attributes
    ----------
    copied_bytes : int
        Bytes of tensor data that the bridge itself copied in host memory, server and stub together.
    copies : int
        How many times.
    """

    __slots__ = ("copied_bytes", "copies", "execute_ns", "executions", "model", "version")

    def __init__(self, model: str, version: int) -> None:
        self.model = model
        self.version = version
        self.copied_bytes = 0
        self.copies = 0
        self.executions = 0
        self.execute_ns = 0

    def copied(self, nbytes: int) -> None:
        """Count a copy of tensor data."""
        if nbytes:
            self.copied_bytes += nbytes
            self.copies += 1

    def executed(self, requests: int, nanoseconds: int) -> None:
        """Count requests that went through ``execute``."""
        self.executions += requests
        self.execute_ns += nanoseconds


class ModelState:
    """A model's counters and gauges at this moment."""

    __slots__ = ("counters", "pending", "restarts")

    def __init__(self, counters: ModelCounters, pending: int, restarts: int) -> None:
        self.counters = counters
        self.pending = pending
        self.restarts = restarts


class _ModelCollector(Collector):
    def __init__(self, states: Callable[[], Iterable[ModelState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "version"]
        copied = CounterMetricFamily(
            "gpubridge_copied_bytes", "Tensor bytes copied by the bridge", labels=[*labels, "kind"]
        )
        copies = CounterMetricFamily(
            "gpubridge_copies", "Copies of tensor data by the bridge", labels=[*labels, "kind"]
        )
        executions = CounterMetricFamily(
            "nv_inference_count", "Number of inferences performed", labels=labels
        )
        durations = CounterMetricFamily(
            "nv_inference_compute_infer_duration_us", "Cumulative execute time", labels=labels
        )
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests queued or executing", labels=labels
        )
        restarts = CounterMetricFamily(
            "gpubridge_stub_restarts", "Times that a stub was started again", labels=labels
        )
        for state in self._states():
            counters = state.counters
            key = [counters.model, str(counters.version)]
            copied.add_metric([*key, "host"], counters.copied_bytes)
            copies.add_metric([*key, "host"], counters.copies)
            executions.add_metric(key, counters.executions)
            durations.add_metric(key, counters.execute_ns / 1000)
            pending.add_metric(key, state.pending)
            restarts.add_metric(key, state.restarts)
        yield from (copied, copies, executions, durations, pending, restarts)


def metrics_page(states: Callable[[], Iterable[ModelState]]) -> bytes:
    """Return the metrics in Prometheus' text form."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ModelCollector(states))
    return generate_latest(registry)
