"""One picture of images on CPUs: images per second by batch, for one instance and for several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.image_rows import BACKEND, OURS_PILLOW, TRITON, ImageReport, ImageRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {BACKEND: "#2a7f4f", OURS_PILLOW: "#5b8fbf", TRITON: "#9a9a9a"}
_WIDTH = 0.27


def draw(report: ImageReport, target: Path) -> None:
    """Write the picture to ``target``."""
    # Imported here: who reads the table alone needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    counts = sorted({row.instances for row in report.rows})
    figure = Figure(figsize=(5.2 * len(counts), 3.8), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, instances in zip(panels, counts, strict=True):
        rows = [row for row in report.rows if row.instances == instances and row.loaded]
        for number, (side, colour) in enumerate(_COLOURS.items()):
            places = [index + (number - 1) * _WIDTH for index in range(len(rows))]
            heights = [row.median(side) or 0.0 for row in rows]
            axes.bar(places, heights, _WIDTH, color=colour, label=_name(side))
        _write_ratios(axes, rows)
        axes.set_xticks(range(len(rows)), [str(row.batch) for row in rows])
        axes.set_xlabel("images in a request")
        axes.set_title(f"{instances} instance{'s' * (instances > 1)}", fontsize=10)
    panels[0].set_ylabel("images/s")
    panels[-1].legend(fontsize=8, loc="lower right")
    machine = report.machine
    figure.suptitle(
        f"photographs to tensors, {machine['cpu']}, {machine['cores']} cores; "
        "above: times Triton's Pillow model.py",
        fontsize=10,
    )
    figure.savefig(target, dpi=130)


def _name(side: str) -> str:
    return side if side == TRITON else f"gpubridge, {side}"


def _write_ratios(axes: Axes, rows: Sequence[ImageRow]) -> None:
    for index, row in enumerate(rows):
        ratio, height = row.ratio(BACKEND, TRITON), row.median(BACKEND)
        if ratio is not None and height is not None:
            place = (index - _WIDTH, height)
            axes.annotate(f"{ratio:.1f}×", place, ha="center", va="bottom", fontsize=8)
