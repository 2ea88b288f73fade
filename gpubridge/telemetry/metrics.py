"""The metrics page: Triton's names and labels, so that its dashboards work, and gpubridge's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpubridge.telemetry.exposition import Family, render
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.settings import MetricsSettings
from gpubridge.telemetry.statistics import STEPS, DeviceWork, ModelStatistics

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda s: s.success_count,
    ),
    ("nv_inference_count", "Number of inferences performed", lambda s: s.inferences),
    ("nv_inference_exec_count", "Number of model executions performed", lambda s: s.executions),
)
_DURATIONS: tuple[tuple[str, Callable[[ModelStatistics], int]], ...] = (
    ("inference request", lambda s: s.success_ns),
    ("inference queuing", lambda s: s.queue_ns),
    ("compute input", lambda s: s.input_ns),
    ("compute inference", lambda s: s.infer_ns),
    ("inference compute output", lambda s: s.output_ns),
)
"""Triton's name for each of ``STEPS``, and its cumulative duration."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model's statistics and gauges at this moment.

    ``pending`` requests have no answer yet; ``queued`` ones of them are at no stub. ``fallbacks``
    says how often a slower way was taken, by reason, ``device_work`` what was done on GPUs.
    """

    statistics: ModelStatistics
    pending: int
    queued: int
    restarts: int
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    device_work: DeviceWork = field(default_factory=DeviceWork)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that distinguish its samples from those of other models."""
        return self.statistics.labels


def metrics_page(
    states: Sequence[ModelState],
    machine: MachineMetrics,
    settings: MetricsSettings,
    custom: Iterable[Family] = (),
) -> bytes:
    """Return the metrics in Prometheus' text form; ``custom`` are the families that models make."""
    return render(
        [
            *_inference(states, settings),
            *machine.families(),
            *_summaries(states, settings),
            *_histograms(states),
            *_bridge(states),
            _fallbacks(states),
            *custom,
        ]
    )


def _inference(states: Sequence[ModelState], settings: MetricsSettings) -> Iterator[Family]:
    """Give Triton's families, in its order."""
    for name, text, value in _COUNTERS:
        yield _counter(name, text, value, states)
        if name == "nv_inference_request_success":
            yield _failures(states)
    if settings.counter_latencies:
        for step, (called, summed) in zip(STEPS, _DURATIONS, strict=True):
            text = f"Cumulative {called} duration in microseconds"
            yield _counter(f"nv_inference_{step}_duration_us", text, _micros(summed), states)
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


def _counter(
    name: str, text: str, value: Callable[[ModelStatistics], float], states: Sequence[ModelState]
) -> Family:
    family = Family(name, text, "counter")
    for state in states:
        family.add(state.labels, value(state.statistics))
    return family


def _micros(summed: Callable[[ModelStatistics], int]) -> Callable[[ModelStatistics], int]:
    return lambda statistics: summed(statistics) // 1000


def _summaries(states: Sequence[ModelState], settings: MetricsSettings) -> Iterator[Family]:
    """Give the quantiles of the last minute; counts and sums are those since the load, as Triton's."""
    quantiles = [quantile for quantile, _ in settings.summary_quantiles]
    families = [
        Family(
            f"nv_inference_{step}_summary_us",
            f"Summary of the {step.replace('_', ' ')} duration in microseconds",
            "summary",
        )
        for step in STEPS
    ]
    for state in states:
        if state.statistics.window is None:
            continue
        found = state.statistics.window.quantiles(quantiles)
        for family, (_, summed), values in zip(families, _DURATIONS, found, strict=True):
            family.add(state.labels, state.statistics.success_count, "_count")
            family.add(state.labels, summed(state.statistics) // 1000, "_sum")
            for quantile, value in zip(quantiles, values, strict=True):
                family.add({**state.labels, "quantile": f"{quantile:g}"}, value)
    yield from families


def _histograms(states: Sequence[ModelState]) -> Iterator[Family]:
    family = Family(
        "nv_inference_first_response_histogram_ms",
        "Time from a request to its first response in milliseconds",
        "histogram",
    )
    for state in states:
        histogram = state.statistics.first_response
        if histogram is None:
            continue
        family.add(state.labels, histogram.count, "_count")
        family.add(state.labels, histogram.sum_ms, "_sum")
        for bound, count in histogram.buckets():
            text = "+Inf" if math.isinf(bound) else f"{bound:g}"
            family.add({**state.labels, "le": text}, count, "_bucket")
    yield family


def _bridge(states: Sequence[ModelState]) -> Iterator[Family]:
    """Give the families that Triton has no counterpart of."""
    copied = Family("gpubridge_copied_bytes_total", "Tensor bytes copied by the bridge", "counter")
    copies = Family("gpubridge_copies_total", "Copies of tensor data by the bridge", "counter")
    waits = Family(
        "gpubridge_device_waits_total", "Times that a stub waited for its GPU", "counter"
    )
    restarts = Family(
        "gpubridge_stub_restarts_total", "Times that a stub was started again", "counter"
    )
    queued = Family(
        "gpubridge_queued_requests", "Requests that no stub has been given yet", "gauge"
    )
    for state in states:
        queued.add(state.labels, state.queued)
        labels = {**state.labels, "kind": "host"}
        copied.add(labels, state.statistics.copied_bytes)
        copies.add(labels, state.statistics.copies)
        if state.device_work.any:
            for kind, nbytes, count in state.device_work.kinds():
                copied.add({**state.labels, "kind": kind}, nbytes)
                copies.add({**state.labels, "kind": kind}, count)
            waits.add(state.labels, state.device_work.waits)
        restarts.add(state.labels, state.restarts)
    yield from (queued, copied, copies, waits, restarts)


def _fallbacks(states: Sequence[ModelState]) -> Family:
    family = Family("gpubridge_fallbacks_total", "Times that a slower way was taken", "counter")
    for state in states:
        for reason, count in state.fallbacks.items():
            family.add({**state.labels, "reason": reason}, count)
    return family
