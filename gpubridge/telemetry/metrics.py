"""The metrics page: Triton's families, with its names and labels, and gpubridge's own."""

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
_CACHE: tuple[tuple[str, str, Callable[[ModelStatistics], int]], ...] = (
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.cache_hits),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.cache_hit_ns // 1000,
    ),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.cache_misses),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (lookup) duration per model, in microseconds",
        lambda s: s.cache_miss_ns // 1000,
    ),
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model's current statistics and gauges.

    ``pending`` requests have no last response yet; ``waiting`` of them are not executed yet, of which
    ``queued`` are not sent to a stub. ``fallbacks`` counts slower fallbacks by reason, ``device_work`` work
    on GPUs.
    """

    statistics: ModelStatistics
    pending: int
    waiting: int
    queued: int
    restarts: int
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    device_work: DeviceWork = field(default_factory=DeviceWork)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the model's samples."""
        return self.statistics.labels


def metrics_page(
    states: Sequence[ModelState],
    machine: MachineMetrics,
    settings: MetricsSettings,
    custom: Iterable[Family] = (),
) -> bytes:
    """Return the metrics in Prometheus' text format; ``custom`` are the families of models."""
    return render(
        [
            *_inference(states, settings),
            *machine.families(),
            *_summaries(states, settings),
            *_histograms(states),
            *(_request_histograms(states) if settings.histograms else ()),
            *_own_families(states),
            _fallbacks(states),
            *custom,
        ]
    )


MODEL_STATES = ("ready", "degraded", "restarting", "failed", "loading", "unloading")
"""The conditions of models that are served or should be (`gpubridge.protocol.conditions`)."""


def model_states(rows: Iterable[tuple[str, int, str]]) -> Family:
    """Return the states of model versions (0: unknown), given by name, version and state."""
    family = Family(
        "gpubridge_model_state", "Whether a model version is in the state (1) or not (0)", "gauge"
    )
    for model, version, state in rows:
        for each in MODEL_STATES:
            labels = {"model": model, "version": str(version or ""), "state": each}
            family.add(labels, int(each == state))
    return family


def _inference(states: Sequence[ModelState], settings: MetricsSettings) -> Iterator[Family]:
    """Yield Triton's families, in its order."""
    for name, text, value in _COUNTERS:
        yield _counter(name, text, value, states)
        if name == "nv_inference_request_success":
            yield _failures(states)
    if settings.counter_latencies:
        for step, (called, summed) in zip(STEPS, _DURATIONS, strict=True):
            text = f"Cumulative {called} duration in microseconds"
            yield _counter(f"nv_inference_{step}_duration_us", text, _micros(summed), states)
    caching = [state for state in states if state.statistics.caches]
    for name, text, value in _CACHE:
        yield _counter(name, text, value, caching)
    pending = Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "gauge",
    )
    for state in states:
        pending.add(state.labels, state.waiting)
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
    """Yield the quantiles of the last minute; as in Triton, counts and sums are since the load."""
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
        counted = state.statistics
        counts = [counted.success_count] * 2 + [counted.executed_count] * (len(STEPS) - 2)
        for family, count, (_, summed), values in zip(
            families, counts, _DURATIONS, found, strict=True
        ):
            family.add(state.labels, count, "_count")
            family.add(state.labels, summed(counted) // 1000, "_sum")
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


_DURATION_BUCKETS = {
    index: bound
    for index, bound in enumerate(ModelStatistics.duration_bounds)
    if bound in {step * 10**power for step in (10, 25, 50) for power in range(4, 9)} | {10**10}
}
"""Upper bounds in nanoseconds, 100 us to 10 s, by their indices among all that are counted."""

_BATCH_SIZES = tuple(1 << power for power in range(9))


def _request_histograms(states: Sequence[ModelState]) -> Iterator[Family]:
    """Yield durations of requests and sizes of batches, of models that have executed any."""
    durations = Family(
        "gpubridge_request_duration_seconds",
        "Time from a request to the end of its execution and the passing on of its last response",
        "histogram",
    )
    sizes = Family("gpubridge_batch_size", "Batch sizes of executions", "histogram")
    for state in states:
        counted = state.statistics
        if counted.success_count:
            spent = (counted.success_ns + counted.answer_ns) / 1e9
            _add_buckets(
                durations,
                state.labels,
                spent,
                counted.duration_counts,
                {index: bound / 1e9 for index, bound in _DURATION_BUCKETS.items()},
            )
        if counted.executions:
            rows = [(size, row[0]) for size, row in counted.batch_rows.items()]
            summed = sum(size * count for size, count in rows)
            _add_buckets(sizes, state.labels, summed, rows, {size: size for size in _BATCH_SIZES})
    yield from (durations, sizes)


def _add_buckets(
    family: Family,
    labels: Mapping[str, str],
    summed: float,
    rows: Sequence[tuple[int, int]],
    bounds: Mapping[int, float],
) -> None:
    """Add a histogram; ``rows`` are keys with counts, ``bounds`` upper bounds by the largest key below."""
    for most, bound in bounds.items():
        count = sum(count for key, count in rows if key <= most)
        family.add({**labels, "le": f"{bound:g}"}, count, "_bucket")
    total = sum(count for _, count in rows)
    family.add({**labels, "le": "+Inf"}, total, "_bucket")
    family.add(labels, total, "_count")
    family.add(labels, summed, "_sum")


def _own_families(states: Sequence[ModelState]) -> Iterator[Family]:
    """Yield the families that Triton does not have."""
    copied = Family("gpubridge_copied_bytes_total", "Tensor bytes copied by the bridge", "counter")
    copies = Family("gpubridge_copies_total", "Copies of tensor data by the bridge", "counter")
    waits = Family(
        "gpubridge_device_waits_total", "Times that a stub waited for its GPU", "counter"
    )
    restarts = Family(
        "gpubridge_stub_restarts_total", "Times that a stub was started again", "counter"
    )
    answers = Family(
        "gpubridge_answer_duration_us_total",
        "Cumulative time from executions to the passing on of responses in microseconds",
        "counter",
    )
    queued = Family(
        "gpubridge_queued_requests", "Requests that no stub has been given yet", "gauge"
    )
    unfinished = Family("gpubridge_open_requests", "Requests without a last response", "gauge")
    for state in states:
        unfinished.add(state.labels, state.pending)
        queued.add(state.labels, state.queued)
        answers.add(state.labels, state.statistics.answer_ns // 1000)
        labels = {**state.labels, "kind": "host"}
        copied.add(labels, state.statistics.copied_bytes)
        copies.add(labels, state.statistics.copies)
        if state.device_work.any:
            for kind, nbytes, count in state.device_work.kinds():
                copied.add({**state.labels, "kind": kind}, nbytes)
                copies.add({**state.labels, "kind": kind}, count)
            waits.add(state.labels, state.device_work.waits)
        restarts.add(state.labels, state.restarts)
    yield from (unfinished, queued, answers, copied, copies, waits, restarts)


def _fallbacks(states: Sequence[ModelState]) -> Family:
    family = Family("gpubridge_fallbacks_total", "Times that a slower way was taken", "counter")
    for state in states:
        for reason, count in state.fallbacks.items():
            family.add({**state.labels, "reason": reason}, count)
    return family
