"""Tables of ``gpubridge top``: figures of the time between two status documents."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpubridge.errors import unavailable

_PARTS = ("queue_us", "input_us", "execute_us", "output_us", "cache_us", "answer_us")
_MISSING = "-"
_LONGEST_LINE = 300


class Table(NamedTuple):
    """Rows of text below a header; ``texts`` is the number of columns that are aligned to the left."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int


MODELS = (
    "MODEL", "VERSION", "STATE", "READY", "REQ/S", "FAIL/S", "P50_MS", "P99_MS", "QUEUED", "BATCH",
    "QUEUE%", "INPUT%", "EXECUTE%", "OUTPUT%", "CACHE%", "ANSWER%", "RESTARTS", "SLOWER",
)  # fmt: skip
INSTANCES = (
    "INSTANCE", "STATE", "PYTHON", "PID", "DEVICE", "IN_FLIGHT", "RSS_MB", "GPU_MB", "RESTARTS",
)  # fmt: skip
ERRORS = ("WHEN", "MODEL", "ERROR", "REQUESTS")


def tables(
    before: Mapping[str, Any], now: Mapping[str, Any], *, by_rate: bool = False
) -> list[Table]:
    """Return the models, their instances and their last errors.

    ``by_rate``: the models with the most requests first; otherwise in the order of their names.

    Raises BridgeError: UNAVAILABLE if something is not in the documents.
    """
    try:
        return _tables(before, now, by_rate)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise unavailable(f"the server's status cannot be read: {error!r}") from error


def _tables(before: Mapping[str, Any], now: Mapping[str, Any], by_rate: bool) -> list[Table]:
    old = {_key(model): model.get("statistics", {}) for model in before["models"]}
    seconds = now["time"] - before["time"]
    bounds = now.get("duration_bounds_us", ())
    changes = [(m, _change(old.get(_key(m), {}), m.get("statistics", {}))) for m in now["models"]]
    changes.sort(key=lambda each: (-each[1].get("success", 0) * by_rate, *_key(each[0])))
    models = Table(MODELS, [_model_row(*each, seconds, bounds) for each in changes], 3)
    listed = [instance for model, _ in changes for instance in model.get("instances", ())]
    instances = Table(INSTANCES, [_instance_row(each) for each in listed], 3)
    return [models, instances, Table(ERRORS, _errors(model for model, _ in changes), 3)]


def plain(made: Sequence[Table]) -> str:
    """Return tables as text, those with rows, separated by empty lines; the first one always."""
    return "\n".join(_aligned(each) for i, each in enumerate(made) if each.rows or not i)


def _aligned(table: Table) -> str:
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < table.texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def shown(text: Any) -> str:
    """Return text in one line, without characters that a terminal obeys."""
    line = str(text)[:_LONGEST_LINE]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _first_line(text: str) -> str:
    return shown(text.strip().partition("\n")[0])


def _key(model: Mapping[str, Any]) -> tuple[str, str]:
    return model["name"], str(model["version"])


def _change(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the difference of sums; those of a model that was loaded anew begin at 0."""
    if old.get("since") != new.get("since") or _requests(old) > _requests(new):
        old = {}
    numbers = [name for name, value in new.items() if isinstance(value, (int, float))]
    made: dict[str, Any] = {name: new[name] - old.get(name, 0) for name in numbers}
    made["failed"] = sum(new.get("failures", {}).values()) - sum(old.get("failures", {}).values())
    for name in ("durations", "batch_sizes"):
        counts = dict(old.get(name, ()))
        made[name] = [(key, count - counts.get(key, 0)) for key, count in new.get(name, ())]
    return made


def _requests(sums: Mapping[str, Any]) -> int:
    failures: Mapping[str, int] = sums.get("failures", {})
    return int(sums.get("success", 0)) + sum(failures.values())


def _model_row(
    model: Mapping[str, Any], change: Mapping[str, Any], seconds: float, bounds: Sequence[float]
) -> list[str]:
    instances = model.get("instances")
    ready = restarts = _MISSING
    if instances is not None:
        ready = f"{sum(each['state'] == 'ready' for each in instances)}/{len(instances)}"
        restarts = str(sum(each["restarts"] for each in instances))
    rates = [_MISSING] * 2
    if "statistics" in model and seconds > 0:
        rates = [f"{change.get(name, 0) / seconds:.1f}" for name in ("success", "failed")]
    sizes = change["batch_sizes"]
    executions = sum(count for _, count in sizes)
    # Members of an ensemble run side by side: their times together may be more than that of the requests.
    total = max(change.get("request_us", 0), sum(change.get(part, 0) for part in _PARTS))
    return [
        shown(model["name"]),
        str(model["version"]),
        shown(model["condition"]),
        ready,
        *rates,
        *(_quantile(change["durations"], bounds, percent) for percent in (50, 99)),
        str(model.get("queued", _MISSING)),
        f"{sum(n * count for n, count in sizes) / executions:.1f}" if executions > 0 else _MISSING,
        *(
            f"{100 * change[part] / total:.0f}" if total > 0 and part in change else _MISSING
            for part in _PARTS
        ),
        restarts,
        str(sum(model["fallbacks"].values())) if "fallbacks" in model else _MISSING,
    ]


def _quantile(durations: Iterable[tuple[int, int]], bounds: Sequence[float], percent: int) -> str:
    """Return the bound of a histogram up to which so many of 100 durations are, in milliseconds."""
    found = sorted((i, count) for i, count in durations if count > 0)
    left = percent * sum(count for _, count in found)
    for i, count in found:
        left -= 100 * count
        if left <= 0:
            return f"{bounds[i] / 1000:.2f}" if i < len(bounds) else f">{bounds[-1] / 1000:.0f}"
    return _MISSING


def _instance_row(instance: Mapping[str, Any]) -> list[str]:
    memory, device = instance.get("memory") or {}, instance.get("device")
    sizes = memory.get("rss_bytes"), instance.get("device_memory_bytes")
    return [
        shown(instance["name"]),
        shown(instance["state"]),
        shown(instance.get("python") or _MISSING),
        str(instance.get("pid", _MISSING)),
        _MISSING if device is None else str(device),
        str(instance["in_flight"]),
        *(_MISSING if size is None else f"{size / 1e6:.0f}" for size in sizes),
        str(instance["restarts"]),
    ]


def _errors(models: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the latest errors, the reasons of models that are not there among them."""
    rows: list[tuple[float, list[str]]] = []
    for model in models:
        name = shown(model["name"])
        if model.get("reason"):
            rows.append((math.inf, [_MISSING, name, _first_line(model["reason"]), _MISSING]))
        for error in model.get("errors", ()):
            when = time.strftime("%H:%M:%S", time.localtime(error["last"]))
            text = _first_line(error["text"])
            rows.append((error["last"], [when, name, text, str(error["requests"])]))
    return [row for _, row in sorted(rows, key=lambda each: -each[0])[:10]]
