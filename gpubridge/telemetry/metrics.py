"""The metrics page: Triton's names and labels, so that its dashboards work, and gpubridge's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubridge.telemetry.exposition import Family, render
from gpubridge.telemetry.statistics import ModelStatistics

__all__ = ["HostMetrics", "ModelState", "metrics_page"]

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda s: s.success_count,
    ),
    ("nv_inference_count", "Number of inferences performed", lambda s: s.inferences),
    ("nv_inference_exec_count", "Number of model executions performed", lambda s: s.executions),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds",
        lambda s: s.success_ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds",
        lambda s: s.queue_ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds",
        lambda s: s.input_ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds",
        lambda s: s.infer_ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds",
        lambda s: s.output_ns // 1000,
    ),
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model's statistics and gauges at this moment."""

    statistics: ModelStatistics
    pending: int
    restarts: int

    @property
    def labels(self) -> dict[str, str]:
        """What tells its samples from other models'."""
        return {"model": self.statistics.model, "version": str(self.statistics.version)}


def metrics_page(states: Sequence[ModelState], host: HostMetrics) -> bytes:
    """Return the metrics in Prometheus' text form."""
    return render([*_inference(states), *host.families(), *_bridge(states)])


def _inference(states: Sequence[ModelState]) -> Iterator[Family]:
    """Give Triton's families, in its order."""
    for name, text, value in _COUNTERS:
        family = Family(name, text, "counter")
        for state in states:
            family.add(state.labels, value(state.statistics))
        yield family
        if name == "nv_inference_request_success":
            yield _failures(states)
    pending = Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "gauge",
    )
    for state in states:
        pending.add(state.labels, state.pending)
    yield pending


def _failures(states: Sequence[ModelState]) -> Family:
    family = Family(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        "counter",
    )
    for state in states:
        for reason, count in state.statistics.failures.items():
            family.add({**state.labels, "reason": reason}, count)
    return family


def _bridge(states: Sequence[ModelState]) -> Iterator[Family]:
    """Give the families that Triton has no counterpart of."""
    copied = Family("gpubridge_copied_bytes_total", "Tensor bytes copied by the bridge", "counter")
    copies = Family("gpubridge_copies_total", "Copies of tensor data by the bridge", "counter")
    restarts = Family(
        "gpubridge_stub_restarts_total", "Times that a stub was started again", "counter"
    )
    for state in states:
        labels = {**state.labels, "kind": "host"}
        copied.add(labels, state.statistics.copied_bytes)
        copies.add(labels, state.statistics.copies)
        restarts.add(state.labels, state.restarts)
    yield from (copied, copies, restarts)


class HostMetrics:
    """Triton's gauges of the machine's CPU; utilisation is that since the page was last asked for."""

    def __init__(self) -> None:
        self._seen = _cpu_times()

    def families(self) -> Iterator[Family]:
        """Give the three gauges."""
        busy, total = _cpu_times()
        seen_busy, seen_total = self._seen
        self._seen = busy, total
        share = (busy - seen_busy) / (total - seen_total) if total > seen_total else 0.0
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for name, text, value in (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", share),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory),
            (
                "nv_cpu_memory_used_bytes",
                "CPU used memory (RAM), in bytes",
                memory - _available_bytes(),
            ),
        ):
            family = Family(name, text, "gauge")
            family.add({}, value)
            yield family


def _cpu_times() -> tuple[int, int]:
    """Return the ticks that the machine was busy for, and all ticks."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def _available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
