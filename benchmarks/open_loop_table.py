"""The figures of latency at given rates, as a page of Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.varied_table import Sample, number, table

__all__ = ["SHARES", "OpenResult", "document", "page"]

#: Shares of each side's own rate.
SHARES = (0.3, 0.5, 0.7, 0.9)
# Triton's p99 over gpubridge's, of the work and share that are bounded: minimum and aim.
_BOUNDS = {("add_sub_ids", 0.7): (2.0, 5.0)}
_KEPT_UP = 0.97


@dataclass(frozen=True, slots=True)
class OpenResult:
    """Samples of a work at a share of each side's own rate, side by side."""

    name: str
    title: str
    share: float
    ours: Sequence[Sample]
    theirs: Sequence[Sample]
    failure: str = ""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """How many times less gpubridge's p99 has to be than Triton's, and is wanted to be."""
        return _BOUNDS.get((self.name, self.share), (None, None))

    @property
    def ratio(self) -> float | None:
        """Triton's p99 over gpubridge's: the median of the rounds."""
        if not self.ours or not self.theirs:
            return None
        pairs = zip(self.theirs, self.ours, strict=True)
        return statistics.median(theirs["p99_us"] / ours["p99_us"] for theirs, ours in pairs)

    @property
    def verdict(self) -> str:
        """Compare the ratio with the bounds; say where a side did not keep up."""
        if self.failure:
            return "failed"
        behind = [
            side
            for side, samples in (("gpubridge", self.ours), ("Triton", self.theirs))
            if any(sample["rate"] < _KEPT_UP * sample["offered"] for sample in samples)
        ]
        said = [f"{' and '.join(behind)} did not keep up"] if behind else []
        minimum, aim = self.bounds
        if self.ratio is not None and minimum is not None and aim is not None:
            reached = "minimum met" if self.ratio >= minimum else "below minimum"
            said.insert(0, "aim met" if self.ratio >= aim else reached)
        return "; ".join(said) or "no minimum set"


def page(about: Mapping[str, Any], results: Sequence[OpenResult]) -> str:
    """Return the page of a run."""
    machine = about["machine"]
    figures = ("p50", "p99", "p99.9")
    headings = ["work, at a share of each side's own rate", "offered", "Triton"]
    headings += [cell for figure in figures for cell in (f"{figure} µs", "Triton")]
    headings += ["p99 ratio", "minimum", "aim", "", "CPU µs", "Triton", "client late, p99.9 µs"]
    lines = [
        "# Latency at given rates, side by side",
        "",
        (
            "Written by `python -m benchmarks.open_loop`, not by hand. Requests come as a Poisson process; "
            "latency counts from the time that a request was meant to be sent to its answer, also where it "
            "waits for one of the connections. The ratio is Triton's p99 over gpubridge's."
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
        f"- client: {about['client']}, on the same machine"
        + ", before all other processes" * _client_first(results),
        "",
        *table(headings, [_cells(result) for result in results]),
        *(
            f"- `{result.name}` at {result.share:.0%} failed: {result.failure}"
            for result in results
            if result.failure
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def document(about: Mapping[str, Any], results: Sequence[OpenResult]) -> dict[str, Any]:
    """Return everything that was seen."""
    rows = [
        {
            "name": each.name,
            "share": each.share,
            "gpubridge": each.ours,
            "triton": each.theirs,
            "failure": each.failure,
        }
        for each in results
    ]
    return {**about, "rows": rows}


def _client_first(results: Sequence[OpenResult]) -> bool:
    samples = [sample for each in results for sample in (*each.ours, *each.theirs)]
    return bool(samples) and all(sample["client_first"] for sample in samples)


def _cells(result: OpenResult) -> list[str]:
    cells = [f"{result.title}, {result.share:.0%}"]
    sides = (result.ours, result.theirs)
    for figure in ("offered", "p50_us", "p99_us", "p999_us"):
        cells += [_median(side, figure) for side in sides]
    cells += [*map(number, (result.ratio, *result.bounds)), result.verdict]
    cells += [_median(side, "cpu_us") for side in sides]
    return [*cells, " / ".join(_median(side, "late_p999_us") for side in sides if side)]


def _median(samples: Sequence[Sample], figure: str) -> str:
    return number(statistics.median(sample[figure] for sample in samples) if samples else None)
