"""The page of a fleet: its servers, with links to their own pages, and the sums of their models' statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubridge.ray.server_address import ServerAddress

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="5">
<title>gpubridge: fleet</title>
<link rel="icon" href="data:,">
<style>
body { margin: 0 auto; max-width: 60rem; padding: 16px 20px; font: 14px/1.45 system-ui, sans-serif; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-bottom: 20px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid #8886; }
.number { text-align: right; }
.bad { color: light-dark(#b3181f, #ff9a9a); }
</style>
</head>
<body>
<h1>A fleet of gpubridge</h1>
"""
_SERVERS = ("server", "state", "models", "requests", "failed")
_MODELS = ("model", "version", "servers", "requests", "failed", "mean ms", "of that queued ms")
_NUMBERS = _SERVERS[2:] + _MODELS[1:]
Cell = tuple[str, str]
"""The text of a cell, which is escaped, and where it leads or how it looks: a URL, ``bad`` or nothing."""


def fleet_page(
    servers: Sequence[ServerAddress],
    answers: Sequence[tuple[int, Any]],
    merged: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page's HTML.

    - ``answers``: of each server, status and statistics, or an error.
    - ``merged``: the rows of all of them, added up by model and version.
    """
    rows = [_server(*each) for each in zip(servers, answers, strict=True)]
    held = [
        (row["name"], str(row.get("version")))
        for status, body in answers
        if status == 200
        for row in body["model_stats"]
    ]
    models = [_model(row, held) for row in sorted(merged, key=lambda row: str(row["name"]))]
    ready = sum(status == 200 for status, _ in answers)
    said = (
        f"<p>{ready} of {len(servers)} servers answer. A server's own page has its trends, the graph of "
        "its models and what needs attention there; counts are those since each was started.</p>"
    )
    return f"{_HEAD}{said}{_table(_SERVERS, rows)}{_table(_MODELS, models)}</body>\n</html>\n"


def _server(server: ServerAddress, answer: tuple[int, Any]) -> list[Cell]:
    place = f"{server.address}:{server.http_port}"
    name = (place, f"http://{server.address}:{server.metrics_port}/")
    status, body = answer
    if status != 200:
        return [name, (str(body.get("error", f"status {status}")), "bad")]
    counts = [_counts(row) for row in body["model_stats"]]
    failed = sum(count[1] for count in counts)
    return [
        name,
        ("draining" if server.draining else "ready", ""),
        (str(len(counts)), ""),
        (f"{sum(map(sum, counts)):,}", ""),
        (f"{failed:,}", "bad" if failed else ""),
    ]


def _model(row: Mapping[str, Any], held: Sequence[tuple[str, str]]) -> list[Cell]:
    name, version = row["name"], str(row.get("version"))
    good, failed = _counts(row)
    return [
        (str(name), ""),
        (version, ""),
        (str(held.count((name, version))), ""),
        (f"{good + failed:,}", ""),
        (f"{failed:,}", "bad" if failed else ""),
        (_mean_ms(row, "success"), ""),
        (_mean_ms(row, "queue"), ""),
    ]


def _counts(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many requests of a row have succeeded, and failed."""
    stats = row.get("inference_stats", {})
    good, failed = (int(stats.get(name, {}).get("count", 0)) for name in ("success", "fail"))
    return good, failed


def _mean_ms(row: Mapping[str, Any], name: str) -> str:
    duration = row.get("inference_stats", {}).get(name, {})
    count = int(duration.get("count", 0))
    return f"{int(duration.get('ns', 0)) / count / 1e6:.3f}" if count else ""


def _table(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th{_class(name)}>{name}</th>" for name in names)
    lines = "".join(f"<tr>{_cells(names, row)}</tr>\n" for row in rows)
    return f"<div><table>\n<tr>{head}</tr>\n{lines}</table></div>\n"


def _cells(names: Sequence[str], row: Sequence[Cell]) -> str:
    made = []
    for name, (text, look) in zip(names, row, strict=False):
        shown = escape(text)
        if look == "bad":
            shown = f'<span class="bad">{shown}</span>'
        elif look:
            shown = f'<a href="{escape(look)}">{shown}</a>'
        made.append(f"<td{_class(name)}>{shown}</td>")
    return "".join(made)


def _class(name: str) -> str:
    return ' class="number"' if name in _NUMBERS else ""
