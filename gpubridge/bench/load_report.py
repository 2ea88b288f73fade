"""Results of a load: figures, a table, and a picture of latency by quantile."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from gpubridge.bench.arrivals import Followed, check_client, latencies, lateness
from gpubridge.bench.load import Failures
from gpubridge.errors import BridgeError


def figures(followed: Followed, failures: Failures, rate: float | None) -> dict[str, Any]:
    """Return the figures of a load; ``rate``: the requests/s of an open one."""
    seconds = int(followed.answered.max() - followed.meant.min()) / 1e9
    times = followed.answered - followed.meant
    found: dict[str, Any] = {
        "load": "closed" if rate is None else "open",
        "offered": rate,
        "answered": len(times),
        "failed": failures.count,
        "first_failure": failures.first,
        "seconds": seconds,
        "rate": len(times) / max(seconds, 1e-9),
        "mean_us": float(times.mean()) / 1e3,
        **{f"{name}_us": value for name, value in latencies(followed).items()},
        "max_us": float(times.max()) / 1e3,
        **{f"late_{name}_us": value for name, value in lateness(followed).items()},
    }
    found["client"] = ""
    if rate is not None:
        try:
            check_client(found)
        except BridgeError as error:
            found["client"] = error.message
    return found


def table(found: dict[str, Any]) -> str:
    """Return the lines that a terminal shows."""
    offered = "" if found["offered"] is None else f" of {found['offered']:,.0f} meant"
    answered = f"{found['answered']:,} answered in {found['seconds']:.1f} s"
    lines = [f"{answered}, {found['rate']:,.0f}/s{offered}; {found['failed']:,} failed"]
    names = {
        "mean": "mean",
        "p50": "p50",
        "p90": "p90",
        "p99": "p99",
        "p999": "p99.9",
        "max": "max",
    }
    lines.append("".join(f"{name:>12}" for name in names.values()))
    lines.append("".join(f"{found[f'{name}_us'] / 1e3:>9.3f} ms" for name in names))
    if found["first_failure"]:
        lines.append(f"first failure: {found['first_failure']}")
    if found["client"]:
        lines.append(f"warning: {found['client']}")
    return "\n".join(lines)


def draw(followed: Followed, title: str, target: Path) -> str:
    """Write a picture of latency by quantile; return the reason if that is not possible."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and slow to import)

    times = np.sort(followed.answered - followed.meant) / 1e6
    slower = 1 - (np.arange(len(times)) / len(times))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(slower, times)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("share of requests that took at least so long")
    axes.set_ylabel("latency, ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(target, dpi=160, facecolor="white")
    return ""
