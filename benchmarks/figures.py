"""The figures of the recorded results: ``python -m benchmarks.figures`` draws them anew from the JSON files.

They are read at half of their width, in grey, and by colour-blind readers: verdicts differ in shape and
colour, values stand beside the marks, and the machine and the date are in the figure.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.image_rows import BACKEND, OURS_PILLOW, TRITON
from benchmarks.varied_rows import ROWS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
Document = Mapping[str, Any]

_VERDICTS = {
    "aim met": ("#117733", "^"),
    "minimum met": ("#332288", "o"),
    "below minimum": ("#cc3311", "v"),
    "no minimum set": ("#777777", "D"),
}
_SIDES = {
    BACKEND: ("#332288", "", "gpubridge, image_preproc"),
    OURS_PILLOW: ("#88ccee", "//", "gpubridge, Pillow model.py"),
    TRITON: ("#bbbbbb", "", "Triton, Pillow model.py"),
}
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_TITLE_LETTERS = 34
_WIDTH = 7.2
_BAR = 0.27


@dataclass(frozen=True, slots=True)
class Ratios:
    """A row of a comparison: how many times better than Triton, round by round."""

    title: str
    rounds: Sequence[float]
    verdict: str
    minimum: float | None
    aim: float | None

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def figure_of(document: Document) -> Figure | None:
    """Return the figure of a result's document; None if nothing was compared."""
    if "client" in document:
        rows = _varied_rows(document)
        heading = "Triton's CPU time per request over gpubridge's"
    elif "pillow_model_ms" in document:
        return _images(document)
    elif "rows" not in document:
        return None  # a fleet's, which has no peer
    else:
        rows = _compared_rows(document)
        heading = "times better than Triton (of times: the reciprocal)"
    return _ratios(rows, heading, _caption(document)) if rows else None


def draw(document: Document, target: Path) -> bool:
    """Write the figure of a document to ``target``.

    Returns False if nothing was compared, or matplotlib is not installed.
    """
    figure = figure_of(document) if importlib.util.find_spec("matplotlib") else None
    if figure is None:
        return False
    figure.savefig(target, dpi=200, facecolor="white")
    return True


def _compared_rows(document: Document) -> list[Ratios]:
    rows = []
    for row in document["rows"]:
        if not row["ratios"]:
            continue

        def better(ratio: float | None, less: bool = row["less_is_better"]) -> float | None:
            return 1 / ratio if ratio and less else ratio

        rounds = [better(each) or 0.0 for each in row["ratios"]]
        bounds = better(row["minimum"]), better(row["aim"])
        rows.append(Ratios(row["title"], rounds, row["verdict"], *bounds))
    return rows


def _varied_rows(document: Document) -> list[Ratios]:
    samples = {row["name"]: row for row in document["rows"]}
    rows = []
    for known in ROWS:
        row = samples.get(known.name)
        if row is None or not row["triton"]:
            continue
        pairs = zip(row["gpubridge"], row["triton"], strict=True)
        rounds = [
            ours["rate"] / theirs["rate"] if known.by_rate else theirs["cpu_us"] / ours["cpu_us"]
            for ours, theirs in pairs
        ]
        verdict = _verdict(statistics.median(rounds), known.minimum, known.aim)
        rows.append(Ratios(known.title, rounds, verdict, known.minimum, known.aim))
    return rows


def _verdict(ratio: float, minimum: float | None, aim: float | None) -> str:
    if minimum is None:
        return "no minimum set"
    if aim is not None and ratio >= aim:
        return "aim met"
    return "minimum met" if ratio >= minimum else "below minimum"


def _caption(document: Document) -> str:
    """Return the machine, the date and the amount of a run."""
    machine = document["machine"]
    settings = document.get("settings", document)
    amount = f"{settings['rounds']} rounds of {settings['seconds']:g} s"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB; "
        f"{document['started'][:10]}; {amount}; commit {document['commit'][:8]}"
    )


def _ratios(rows: Sequence[Ratios], heading: str, caption: str) -> Figure:
    """Draw medians as marks, the range of the rounds as lines, on a logarithmic axis."""
    titles = [_wrapped(row.title) for row in rows]
    lines = sum(1 + title.count("\n") for title in titles)
    height = 1.9 + 0.16 * len(rows) + 0.17 * lines
    figure = _empty_figure(height)
    axes = figure.subplots()
    for position, row in enumerate(rows):
        _draw_row(axes, position, row)
    axes.set_yticks(range(len(rows)), titles, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _scale(axes, rows)
    axes.set_xlabel(heading, fontsize=11)
    figure.suptitle(caption, fontsize=9, color="#444444")
    _add_legend(figure, {row.verdict for row in rows})
    return figure


def _empty_figure(height: float) -> Figure:
    # Imported here: a run without a peer needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07)
    return Figure(figsize=(_WIDTH, height), layout=layout)


def _wrapped(title: str) -> str:
    """Wrap a title into lines of about the same length."""
    lines = len(textwrap.wrap(title, _TITLE_LETTERS))
    width = next(
        width
        for width in range(1, _TITLE_LETTERS + 1)
        if len(textwrap.wrap(title, width, break_long_words=False)) <= lines
    )
    return textwrap.fill(title, width, break_long_words=False)


def _draw_row(axes: Axes, position: int, row: Ratios) -> None:
    colour, mark = _VERDICTS[row.verdict]
    ends = min(row.rounds), max(row.rounds)
    axes.plot(ends, [position] * 2, color=colour, linewidth=5, alpha=0.3, solid_capstyle="round")
    axes.plot(row.median, position, mark, color=colour, markersize=8)
    for bound, style in ((row.minimum, "-"), (row.aim, ":")):
        if bound is not None:
            place = [position - 0.34, position + 0.34]
            axes.plot([bound, bound], place, style, color="black", linewidth=1.5)
    axes.annotate(
        f"{row.median:.1f}×",
        (1.02, position),
        xycoords=axes.get_yaxis_transform(),
        verticalalignment="center",
        fontsize=10,
        color=colour,
        weight="bold",
    )


def _scale(axes: Axes, rows: Sequence[Ratios]) -> None:
    values = [1.0]
    for row in rows:
        values += [*row.rounds, *(each for each in (row.minimum, row.aim) if each is not None)]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(values) / 1.15, max(values) * 1.15)
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in _TICKS if low <= tick <= high], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.tick_params(axis="x", labelsize=10)
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _add_legend(figure: Figure, verdicts: set[str]) -> None:
    """Explain the marks below the axes, where they cover nothing."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    handles: list[Artist] = [
        Line2D([], [], linestyle="", color=colour, marker=mark, markersize=8, label=verdict)
        for verdict, (colour, mark) in _VERDICTS.items()
        if verdict in verdicts
    ]
    handles += [
        Line2D([], [], color="black", label="minimum"),
        Line2D([], [], color="black", linestyle=":", label="aim"),
        Line2D([], [], color="#777777", linewidth=5, alpha=0.4, label="range of the rounds"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=10)


def _images(document: Document) -> Figure:
    """Draw images per second by the images in a request, a panel for each number of instances."""
    rows = [row for row in document["rows"] if row["connections"] > row["instances"]]
    counts = sorted({row["instances"] for row in rows})
    figure = _empty_figure(4.6)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, instances in zip(panels, counts, strict=True):
        _draw_panel(axes, [row for row in rows if row["instances"] == instances])
        axes.set_title(f"{instances} instance{'s' * (instances > 1)}", fontsize=11)
    panels[0].set_ylabel("images/s", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    note = "above the bars: gpubridge's image_preproc over Triton's Pillow model.py"
    figure.suptitle(f"{_caption(document)}\n{note}", fontsize=9, color="#444444")
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for number, (side, (colour, hatch, label)) in enumerate(_SIDES.items()):
        places = [index + (number - 1) * _BAR for index in range(len(rows))]
        heights = [_images_per_second(row, side) for row in rows]
        axes.bar(places, heights, _BAR, color=colour, hatch=hatch, edgecolor="white", label=label)
    for index, row in enumerate(rows):
        if row["times_triton"] is not None:
            place = (index - _BAR, _images_per_second(row, BACKEND))
            text = f"{row['times_triton']:.1f}×"
            axes.annotate(text, place, (0, 2), textcoords="offset points", ha="center", fontsize=9)
    axes.margins(y=0.08)
    axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows], fontsize=10)
    axes.tick_params(axis="y", labelsize=10)
    axes.set_xlabel("images in a request", fontsize=11)
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _images_per_second(row: Mapping[str, Any], side: str) -> float:
    rounds = row["rounds"].get(side) or [{"images_per_second": 0.0}]
    return float(statistics.median(each["images_per_second"] for each in rounds))


def main() -> None:
    """Draw every figure of the recorded results anew."""
    for path in sorted(RESULTS.glob("*.json")):
        if draw(json.loads(path.read_text()), path.with_suffix(".png")):
            print(f"written: {path.with_suffix('.png')}", file=sys.stderr)


if __name__ == "__main__":
    main()
