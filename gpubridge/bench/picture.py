"""One picture: what of a request's bytes crossed PCIe, and how long it took, by size."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

from gpubridge.bench.measurement import Measured, Point
from gpubridge.bench.verdict import Verdict

__all__ = ["draw"]

_MIB = 1 << 20


def draw(measured: Measured, verdict: Verdict, target: Path) -> str:
    """Write the picture to ``target``; returns why not, where that is not possible."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and slow to import)

    by_path: dict[str, list[Point]] = defaultdict(list)
    for point in measured.points:
        by_path[point.path.title].append(point)
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for title, points in by_path.items():
        style = "o-" if points[0].path.stays else "s--"
        sizes = [point.nbytes / _MIB for point in points]
        right.plot(sizes, [point.p50 for point in points], style, label=title)
        left.plot(sizes, [_share(point) for point in points], style, label=title)
    seen = "by PCIe's counters" if not measured.no_pcie else "by the bridge's own counters"
    left.set_title(f"share of the request's bytes that crossed to or from the host\n{seen}")
    left.set_ylim(bottom=-0.05)
    right.set_yscale("log")
    right.set_title("latency of a request, median, µs")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("MiB of input and of output")
        axes.grid(visible=True, alpha=0.3)
    right.legend(fontsize=8)
    headline = verdict.text().split("\n", 1)[0]
    figure.suptitle(f"{measured.device.name}: {headline}", fontsize=10)
    figure.savefig(target, dpi=130)
    return ""


def _share(point: Point) -> float:
    crossed = point.crossed
    if crossed is None:
        crossed = sum(point.copied[kind] for kind in ("h2d", "d2h"))
    return crossed / point.handed
