"""One picture: how many times better than Triton each row is, against its floor and aim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Report, RowResult, Verdict, advantage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Verdict.AIM: "#2a7f4f",
    Verdict.FLOOR: "#5b8fbf",
    Verdict.BELOW: "#c0504d",
    Verdict.NO_FLOOR: "#9a9a9a",
}


def draw(report: Report, target: Path) -> bool:
    """Write the picture to ``target``; False where no row was compared and nothing is drawn."""
    compared = [result for result in report.results if result.ratio is not None]
    if not compared:
        return False
    # Imported here: a run without a peer needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 1.6 + 0.42 * len(compared)), layout="constrained")
    axes = figure.subplots()
    for position, result in enumerate(reversed(compared)):
        _draw_row(axes, position, result)
    axes.set_yticks(range(len(compared)), [result.row.title for result in reversed(compared)])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.margins(x=0.12)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel(
        "times better than Triton; line: floor, dotted: aim, dots: single rounds\n"
        "green: aim met, blue: floor met, red: below floor, grey: no floor set"
    )
    machine, versions = report.machine, report.versions
    axes.set_title(
        f"gpubridge {versions['gpubridge']} and Triton {versions['Triton']}: "
        f"{machine['cpu']}, {machine['cores']} cores",
        fontsize=10,
    )
    figure.savefig(target, dpi=130)
    return True


def _draw_row(axes: Axes, position: int, result: RowResult) -> None:
    row = result.row
    gains = [advantage(ratio, row) for ratio in result.ratios]
    median = advantage(result.ratio or 1.0, row)
    # A bar on a logarithmic axis has no zero to stand on: it starts at equality.
    axes.barh(position, median - 1, left=1, height=0.55, color=_COLOURS[result.verdict])
    axes.plot(gains, [position] * len(gains), "o", color="black", markersize=3)
    for bar, style in ((row.floor, "-"), (row.aim, ":")):
        if bar is not None:
            place = advantage(bar, row)
            axes.plot([place, place], [position - 0.4, position + 0.4], style, color="#222222")
    axes.annotate(
        f"{median:.2f}×",
        (1.01, position),
        xycoords=axes.get_yaxis_transform(),
        verticalalignment="center",
    )
