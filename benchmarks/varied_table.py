"""The figures of varied traffic as a page of Markdown and as JSON."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.varied_rows import LoadRow, OwnRow, StartRow

__all__ = [
    "OwnResult",
    "Result",
    "Sample",
    "StartResult",
    "document",
    "failures",
    "number",
    "page",
    "table",
]

Sample = dict[str, float]

_NONE = "–"


@dataclass(frozen=True, slots=True)
class Result:
    """A load row's samples: gpubridge's, and Triton's of the same rounds."""

    row: LoadRow
    ours: Sequence[Sample]
    theirs: Sequence[Sample]
    failure: str = ""

    @property
    def cpu_ratio(self) -> float | None:
        """Triton's CPU time per request over gpubridge's: the median of the rounds."""
        return _ratio(self.theirs, self.ours, "cpu_us")

    @property
    def rate_ratio(self) -> float | None:
        """Our rate over Triton's: the median of the rounds."""
        return _ratio(self.ours, self.theirs, "rate")

    @property
    def ratio(self) -> float | None:
        """The ratio that the row's minimum and aim bound."""
        return self.rate_ratio if self.row.by_rate else self.cpu_ratio

    @property
    def verdict(self) -> str:
        """Compare the row's ratio with its minimum and aim."""
        if self.failure:
            return "failed"
        if self.ratio is None or self.row.minimum is None:
            return "not compared" if self.ratio is None else "no minimum set"
        if self.row.aim is not None and self.ratio >= self.row.aim:
            return "aim met"
        return "minimum met" if self.ratio >= self.row.minimum else "below minimum"


@dataclass(frozen=True, slots=True)
class OwnResult:
    """Samples of two works on gpubridge."""

    row: OwnRow
    one: Sequence[Sample]
    other: Sequence[Sample]
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """CPU time per request of the first work over the second's: the median of the rounds."""
        return _ratio(self.one, self.other, "cpu_us")

    @property
    def verdict(self) -> str:
        """Compare the ratio with the row's minimum and aim."""
        if self.failure or self.ratio is None:
            return "failed"
        if self.row.aim is not None and self.ratio <= self.row.aim:
            return "aim met"
        return "minimum met" if self.ratio <= self.row.at_most else "above bar"


@dataclass(frozen=True, slots=True)
class StartResult:
    """Samples of starts."""

    row: StartRow
    ours: Sequence[Sample]
    theirs: Sequence[Sample]
    failure: str = ""


def page(
    about: Mapping[str, Any],
    results: Sequence[Result],
    own: Sequence[OwnResult],
    starts: Sequence[StartResult],
) -> str:
    """Return the page of a run."""
    machine = about["machine"]
    lines = [
        "# Varied traffic, side by side",
        "",
        (
            "Written by `python -m benchmarks.varied`, not by hand. No two requests of a row have the same "
            "bytes, unless it says so. CPU: µs of the server and its stubs per request (per response of a "
            "stream); the ratio is Triton's over gpubridge's, of rates it is gpubridge's over Triton's. "
            "A minimum is one of CPU, or of the rate where the work says so."
        ),
        "",
        (
            f"- {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load average "
            f"{machine['load_average']}"
        ),
        *(f"- {side}: Python {python}" for side, python in about["python"].items()),
        (
            f"- commit {about['commit']}, {about['started']}; {about['rounds']} rounds of "
            f"{about['seconds']} s per side, in turn"
        ),
        f"- client: {about['client']}, on the same machine",
        "",
        *table(
            (
                "work",
                "CPU",
                "Triton",
                "ratio",
                "minimum",
                "aim",
                "",
                "rate",
                "Triton",
                "ratio",
                "p50",
                "Triton",
            ),
            [_cells(result) for result in results],
        ),
        *table(
            ("gpubridge alone", "CPU", "over", "ratio", "at most", "aim", ""),
            [_own_cells(result) for result in own],
        ),
        *table(
            ("starts", "s", "Triton", "ratio", "at most s", "MiB PSS", "Triton"),
            [_start_cells(result) for result in starts],
        ),
        *_further_stubs(starts),
    ]
    lines += [f"- `{name}` failed: {failure}" for name, failure in failures(results, own, starts)]
    return "\n".join(lines).rstrip() + "\n"


def failures(
    results: Sequence[Result], own: Sequence[OwnResult], starts: Sequence[StartResult]
) -> list[tuple[str, str]]:
    """Return the rows without figures, with the reasons."""
    every: list[Result | OwnResult | StartResult] = [*results, *own, *starts]
    return [(each.row.name, each.failure) for each in every if each.failure]


def document(
    about: Mapping[str, Any],
    results: Sequence[Result],
    own: Sequence[OwnResult],
    starts: Sequence[StartResult],
) -> str:
    """Return everything that was seen, as JSON."""
    sides: list[Result | StartResult] = [*results, *starts]
    rows: list[dict[str, Any]] = [
        {"name": each.row.name, "gpubridge": each.ours, "triton": each.theirs} for each in sides
    ]
    rows += [{"name": each.row.name, "one": each.one, "other": each.other} for each in own]
    failed = dict(failures(results, own, starts))
    about = {**about, "failures": failed}
    return json.dumps({**about, "rows": rows}, indent=1, ensure_ascii=False) + "\n"


def _ratio(above: Sequence[Sample], below: Sequence[Sample], figure: str) -> float | None:
    """Return the median of the ratios, round by round; None where a side has no samples."""
    if not above or not below:
        return None
    return statistics.median(
        one[figure] / other[figure] for one, other in zip(above, below, strict=True)
    )


def _median(samples: Sequence[Sample], figure: str) -> float | None:
    return statistics.median(sample[figure] for sample in samples) if samples else None


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table and an empty one; nothing without rows."""
    if not rows:
        return []
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _cells(result: Result) -> list[str]:
    cells = [result.row.title]
    for figure, ratio in (("cpu_us", result.cpu_ratio), ("rate", result.rate_ratio)):
        cells += [number(_median(side, figure)) for side in (result.ours, result.theirs)]
        cells.append(number(ratio))
        if figure == "cpu_us":
            cells += [number(result.row.minimum), number(result.row.aim), result.verdict]
    cells += [number(_median(side, "p50_us")) for side in (result.ours, result.theirs)]
    return cells


def _own_cells(result: OwnResult) -> list[str]:
    row = result.row
    sides = (_median(result.one, "cpu_us"), _median(result.other, "cpu_us"), result.ratio)
    return [row.title, *map(number, (*sides, row.at_most, row.aim)), result.verdict]


def _start_cells(result: StartResult) -> list[str]:
    seconds = [_median(side, "seconds") for side in (result.ours, result.theirs)]
    memory = [_median(side, "pss_mib") for side in (result.ours, result.theirs)]
    ratio = _ratio(result.ours, result.theirs, "seconds")
    figures = (*seconds, ratio, result.row.at_most_seconds, *memory)
    return [result.row.title, *map(number, figures)]


def _further_stubs(starts: Sequence[StartResult]) -> list[str]:
    """Return what each further stub holds, between the first and the last number of models."""
    ordered = sorted((each for each in starts if each.ours), key=lambda each: each.row.models)
    lines = []
    for fewer, more in itertools.pairwise(ordered):
        further = more.row.models - fewer.row.models
        sides = []
        for name, one, other in (
            ("gpubridge", fewer.ours, more.ours),
            ("Triton", fewer.theirs, more.theirs),
        ):
            first, last = _median(one, "pss_mib"), _median(other, "pss_mib")
            if first is not None and last is not None:
                sides.append(f"{name} {(last - first) / further:.1f} MiB")
        lines.append(
            f"- memory of each further stub, {fewer.row.models} to {more.row.models} models: "
            f"{', '.join(sides)}"
        )
    return lines


def number(value: float | None) -> str:
    """Return three digits of a figure."""
    if value is None:
        return _NONE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
