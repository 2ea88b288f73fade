"""Figures of the GPU benchmark, what they say, and the page of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_rows import FLAT, FLAT_FROM, GpuRow
from gpubridge.bench.device_requests import Way
from gpubridge.bench.measurement import size_text

__all__ = ["GpuReport", "GpuResult", "markdown_page"]

_NONE = "–"


@dataclass(slots=True)
class GpuResult:
    """Microseconds of a request by size, gpubridge's and Triton's; what is missing says why."""

    row: GpuRow
    ours: dict[int, float] = field(default_factory=dict)
    theirs: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ratio(self, nbytes: int) -> float | None:
        """Triton's time over gpubridge's at a size."""
        if nbytes not in self.ours or nbytes not in self.theirs:
            return None
        return self.theirs[nbytes] / self.ours[nbytes]

    @property
    def spread(self) -> float | None:
        """The slowest size's time over the fastest's, of those that count; None below two."""
        times = [time for nbytes, time in self.ours.items() if nbytes >= FLAT_FROM]
        return max(times) / min(times) if len(times) > 1 else None

    @property
    def complaints(self) -> list[str]:
        """Figures that the row had to reach and did not."""
        found = list(self.failures)
        if self.row.flat and self.spread is not None and self.spread > FLAT:
            found.append(f"not flat in size: the slowest takes {self.spread:.2f} times the fastest")
        if self.row.minimum is not None:
            nbytes, minimum = self.row.minimum
            ratio = self.ratio(nbytes)
            if ratio is not None and ratio < minimum:
                found.append(
                    f"{ratio:.2f} times Triton at {size_text(nbytes)}, expected {minimum:g}"
                )
        return found


@dataclass(slots=True)
class GpuReport:
    """A run: where and how it was taken, the machine's limits, and its rows."""

    started: str
    commit: str
    device: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    limits: dict[str, dict[int, float]] = field(default_factory=dict)
    results: Sequence[GpuResult] = ()

    def as_document(self) -> dict[str, Any]:
        """Return the report as what is written to JSON; times are microseconds by bytes."""
        return {
            "schema": 1,
            "started": self.started,
            "commit": self.commit,
            "device": self.device,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "limits_us": self.limits,
            "rows": [
                {
                    "name": result.row.name,
                    "title": result.row.title,
                    "gpubridge_us": result.ours,
                    "triton_us": result.theirs,
                    "ratios": {nbytes: result.ratio(nbytes) for nbytes in result.ours},
                    "spread": result.spread,
                    "complaints": result.complaints,
                    "notes": result.notes,
                }
                for result in self.results
            ],
        }


def markdown_page(report: GpuReport) -> str:
    """Return the page of a run."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    machine = report.machine
    origin = "Written by `python -m benchmarks.gpu_lane`, not by hand; what it measures: "
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
    lines = [
        f"# Tensors on a GPU: {report.device}",
        "",
        f"{origin}[GPU checks](../../docs/how-to/gpu-checks.md).",
        "",
        f"- {where}Linux {machine['kernel']}",
        f"- {versions}",
        f"- commit {report.commit}, {report.started}",
        f"- one request after the other, {report.settings['seconds']} s each; medians in µs",
        "",
        "| copy and the wait for it, µs | " + " | ".join(map(size_text, _sizes(report))) + " |",
        "|---|" + "---:|" * len(_sizes(report)),
    ]
    for kind, times in report.limits.items():
        cells = [_number(times.get(nbytes)) for nbytes in _sizes(report)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    headings = "| work | size | gpubridge µs | limit µs | above it | Triton µs | times Triton |"
    lines += ["", headings, "|---|---:|---:|---:|---:|---:|---:|"]
    for result in report.results:
        lines += [_line(report, result, nbytes) for nbytes in result.row.sizes]
    notes = [
        f"`{r.row.name}`: {text}" for r in report.results for text in (*r.complaints, *r.notes)
    ]
    notes += [
        f"`{r.row.name}`: slowest over fastest size from {size_text(FLAT_FROM)} on: {r.spread:.2f}"
        for r in report.results
        if r.row.flat and r.spread is not None
    ]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _line(report: GpuReport, result: GpuResult, nbytes: int) -> str:
    limit = _limit(report, result.row, nbytes)
    ours = result.ours.get(nbytes)
    above = None if ours is None or limit is None else ours - limit
    cells = [
        result.row.title,
        size_text(nbytes),
        _number(ours),
        _number(limit),
        _number(above),
        _number(result.theirs.get(nbytes)),
        _NONE if result.ratio(nbytes) is None else f"{result.ratio(nbytes):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _limit(report: GpuReport, row: GpuRow, nbytes: int) -> float | None:
    """Time of the copies that the row needs, alone; None where that says nothing."""
    if row.way is Way.NETWORK:
        times = [report.limits.get(kind, {}).get(nbytes) for kind in ("h2d", "d2h")]
        return None if None in times else sum(time for time in times if time is not None)
    time = report.limits.get("d2d", {}).get(nbytes)
    return None if time is None or not row.copied else row.copied * time


def _sizes(report: GpuReport) -> list[int]:
    return sorted({nbytes for times in report.limits.values() for nbytes in times})


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"
