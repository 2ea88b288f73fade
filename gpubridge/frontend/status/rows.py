"""Rows of the status document: models, instances, errors and slow requests, as JSON values.

``docs/reference/status.md#fields`` describes every field.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpubridge.engine.ensemble.ensemble_model import EnsembleModel
from gpubridge.engine.ensemble.graph import ROOT
from gpubridge.engine.ensemble.times import RESPONSE, EnsembleTimes
from gpubridge.engine.load_progress import Load
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.model_index import VersionStatus
from gpubridge.engine.supervisor.instance import Instance, InstanceState
from gpubridge.protocol.conditions import index_condition
from gpubridge.telemetry.exposition import Family
from gpubridge.telemetry.statistics import ModelStatistics

Row = dict[str, Any]
Memory = Mapping[int, Row]
"""Memory of processes, by process id."""

_REASON_LETTERS = 4000
_SLOW_OF_MODEL = 5
_CLOCK_SET_SECONDS = 0.1


class _UnixTime:
    """Converts moments of CLOCK_MONOTONIC; a moment has the same time in all documents.

    Unless the machine's clock was set.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self, moment: float) -> float:
        """Return the Unix time of a moment, in seconds to the millisecond."""
        ahead = time.time_ns() / 1e9 - time.monotonic()
        if abs(ahead - self._ahead) > _CLOCK_SET_SECONDS:
            self._ahead = ahead
        return round(self._ahead + moment, 3)


unix_time = _UnixTime()


def row_key(model: Model | None, memory: Memory) -> object:
    """Return a value that changes with everything in the row of a model without pending requests."""
    if model is None:
        return None
    counted = model.statistics
    now = _condition(model), model.pending, counted.fallbacks.total()
    instances = [_key(each, memory) for each in model.instances]
    return counted.since, done_key(counted), now, instances


def done_key(counted: ModelStatistics) -> Sequence[int]:
    """Return numbers that change with every request and every copy, 0 before the first."""
    counts = counted.success_count, counted.executions, counted.fail_count, counted.copies
    # Passed on after they were counted.
    return *counts, counted.answer_ns


def _key(instance: Instance, memory: Memory) -> object:
    run = instance.run
    process = None if run is None else run.process
    measured = None if process is None else memory.get(process.pid)
    return (
        instance.state,
        len(instance.ends),
        instance.restarts,
        measured,
        instance.fallbacks.total(),
    )


def model_row(status: VersionStatus, model: Model | None, memory: Memory, slow: list[Row]) -> Row:
    """Return the row of a model version; ``model`` is None if it is not loaded."""
    row: Row = {
        "name": status.name,
        "version": status.version,
        "state": status.state,
        "reason": status.reason[:_REASON_LETTERS],
        "condition": condition(status, model),
    }
    if model is None:
        return row
    config = model.config
    return {
        **row,
        "ready": model.ready,
        "backend": config.backend or config.message.platform,
        "max_batch_size": config.max_batch_size,
        "scheduler": config.message.WhichOneof("scheduling_choice") or "",
        "decoupled": config.decoupled,
        "pending": model.pending,
        "queued": model.queued,
        "statistics": _statistics(model),
        "instances": [_instance(instance, memory) for instance in model.instances],
        "fallbacks": model.fallbacks,
        "calls": [
            {
                "model": name,
                "version": version,
                "count": counts.ended,
                "call_us": counts.spent_ns // 1000,
            }
            for (name, version), counts in model.statistics.calls.items()
        ],
        "errors": [
            {**error._asdict(), "last": unix_time(error.last)}
            for error in model.statistics.errors.rows()
        ],
        "slowest": slow,
        "ensemble": _ensemble(model.times) if isinstance(model, EnsembleModel) else None,
    }


def condition(status: VersionStatus, model: Model | None) -> str:
    """Return the condition of a model version, in the words of `gpubridge.protocol.conditions`."""
    if model is None or status.state != "READY":
        return index_condition(status.state, status.reason)
    return _condition(model)


def _condition(model: Model) -> str:
    """Return the condition of a loaded model: that of an ensemble is the worst of its members'."""
    if model.ready:
        return "ready" if model.whole else "degraded"
    if model.members:
        failed = any(_condition(member) == "failed" for member in model.members)
    else:
        failed = all(instance.state is InstanceState.FAILED for instance in model.instances)
    return "failed" if failed else "restarting"


def _statistics(model: Model) -> Row:
    counted = model.statistics
    times = {"since": counted.since, "last_execution": counted.last_inference_ms / 1000}
    return {**times, **sums_row(model)}


def sums_row(model: Model) -> Row:
    """Return the sums of a model's requests since its load."""
    counted: ModelStatistics = model.statistics
    copies = {"host": {"count": counted.copies, "bytes": counted.copied_bytes}}
    work = model.device_work
    if work.any:
        copies.update((kind, {"count": n, "bytes": nbytes}) for kind, nbytes, n in work.kinds())
    return {
        "success": counted.success_count,
        "failures": {reason: n for reason, n in counted.failures.items() if n},
        "cache_hits": counted.cache_hits,
        "cache_misses": counted.cache_misses,
        "inferences": counted.inferences,
        "executions": counted.executions,
        "request_us": (counted.success_ns + counted.answer_ns) // 1000,
        "queue_us": counted.queue_ns // 1000,
        "input_us": counted.input_ns // 1000,
        "execute_us": counted.infer_ns // 1000,
        "output_us": counted.output_ns // 1000,
        "cache_us": counted.cache_hit_ns // 1000,
        "answer_us": counted.answer_ns // 1000,
        "durations": counted.duration_counts,
        "batch_sizes": [(size, row[0]) for size, row in counted.batch_rows.items()],
        "copies": copies,
        "device_waits": work.waits,
    }


def _instance(instance: Instance, memory: Memory) -> Row:
    run = instance.run
    process = None if run is None else run.process
    row = {
        "name": instance.name,
        "state": instance.state.value,
        "device": instance.settings.device,
        "interpreter": instance.settings.environment.python,
        "restarts": instance.restarts,
        "in_flight": instance.feed.in_flight,
        "ends": [{**end._asdict(), "time": unix_time(end.time)} for end in instance.ends],
    }
    if run is None or process is None:
        return row
    executing = run.connection.executing_ns
    arena = run.connection.arena
    return {
        **row,
        "pid": process.pid,
        "python": run.connection.python,
        "started": unix_time(process.started),
        "executing_us": None if executing is None else executing // 1000,
        "memory": memory.get(process.pid),
        "device_memory_bytes": 0 if arena is None else arena.nbytes,
    }


def load_row(load: Load) -> Row:
    """Return the row of a load in progress."""
    step, part = load.report()
    return {
        "model": load.model,
        "version": load.version,
        "step": step,
        "fraction": part,
        "since": unix_time(load.since),
    }


def slow_rows(model: Model) -> list[Row]:
    """Return the slowest requests of the last minutes, the slowest first."""
    found = model.statistics.slow_requests(time.monotonic_ns())
    # By the whole duration.
    found.sort(key=lambda row: row[2] + row[-1], reverse=True)
    rows = []
    for identifier, ended, *durations in found[:_SLOW_OF_MODEL]:
        spent, queue, taken, execute, output, answer = (each // 1000 for each in durations)
        # What was executed took some time there.
        is_hit = not any(durations[1:5])
        rows.append(
            {
                "model": model.name,
                "version": model.version,
                "id": identifier,
                "time": unix_time(ended / 1e9),
                "request_us": spent + answer,
                "queue_us": queue,
                "input_us": taken,
                "execute_us": execute,
                "output_us": output,
                "cache_us": spent if is_hit else 0,
                "answer_us": answer,
            }
        )
    return rows


SLOWEST = 20
"""Slowest requests of the document, of each model as many as its row has."""


def _ensemble(times: EnsembleTimes) -> Row:
    ends = {ROOT: None, RESPONSE: None}
    return {
        "steps": [
            {
                "model": step.model,
                "version": step.version,
                "count": count,
                "step_us": spent_ns // 1000,
            }
            for step, count, spent_ns in times.durations()
        ],
        "edges": [
            {
                "from": ends.get(edge.source, edge.source),
                "to": ends.get(edge.target, edge.target),
                "tensors": edge.tensors,
                "count": edge.passed,
                "wait_us": edge.wait_ns // 1000,
            }
            for edge in times.edges()
        ],
    }


def machine_row(families: Iterable[Family]) -> Row:
    """Return the figures of the machine: gauges of the metrics, by their names, those of GPUs by GPU."""
    row: Row = {}
    gpus: dict[str, Row] = {}
    for family in families:
        for _, labels, value in family.samples:
            uuid = labels.get("gpu_uuid")
            if uuid is None:
                row[family.name.removeprefix("nv_")] = value
            else:
                gpu = gpus.setdefault(uuid, {"uuid": uuid})
                gpu[family.name.removeprefix("nv_gpu_").removeprefix("nv_")] = value
    return {**row, "gpus": list(gpus.values())}
