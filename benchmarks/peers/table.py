"""The figures of gpubridge beside other servers, as a page of Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.works import WORKS
from benchmarks.varied_table import Sample, number, table

__all__ = ["PeerResult", "document", "page"]

_OURS = "gpubridge"
_FIGURES = ("cpu_us", "rate", "p50_us", "p99_us", "pss_mib", "processes", "start_seconds")


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Samples of a server at a work."""

    work: str
    server: str
    samples: Sequence[Sample]
    failure: str = ""

    def median(self, figure: str) -> float | None:
        """Return the median of the rounds; None without samples."""
        return statistics.median(each[figure] for each in self.samples) if self.samples else None


def page(about: Mapping[str, Any], results: Sequence[PeerResult]) -> str:
    """Return the page of a run."""
    machine = about["machine"]
    lines = [
        "# gpubridge beside other servers",
        "",
        (
            "Written by `python -m benchmarks.peers`, not by hand. Each server has its default settings and one "
            "process for the model, runs alone, and is checked before and after the load. No two requests have the same "
            "bytes. CPU, PSS and processes are those of the server and all that it started; the start ends with the first "
            "right answer."
        ),
        "",
        (
            f"- {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load average "
            f"{machine['load_average']}"
        ),
        f"- {'; '.join(f'{name}: {said}' for name, said in about['installed'].items() if said)}",
        (
            f"- commit {about['commit']}, {about['started']}; {about['rounds']} rounds of "
            f"{about['seconds']} s, in turn"
        ),
        f"- client: {about['client']}, on the same machine",
        *(f"- {name} is absent: {_line(reason)}" for name, reason in about["absent"].items()),
        "",
    ]
    for work in WORKS:
        mine = [result for result in results if result.work == work.name]
        if not mine:
            continue
        headings = ["server", f"CPU µs per {work.unit}", "times gpubridge's", f"{work.unit}s/s"]
        headings += ["p50 µs of a request", "p99 µs", "PSS MiB", "processes", "start s"]
        ours = next(each.median("cpu_us") for each in mine if each.server == _OURS)
        lines += [f"## {work.title[0].upper()}{work.title[1:]}", ""]
        lines += table(headings, [_cells(result, ours) for result in mine if not result.failure])
        lines += [f"- {each.server} failed: {_line(each.failure)}" for each in mine if each.failure]
        lines.append("")
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def document(about: Mapping[str, Any], results: Sequence[PeerResult]) -> dict[str, Any]:
    """Return everything that was seen."""
    return {**about, "rows": [asdict(result) for result in results]}


def _cells(result: PeerResult, ours: float | None) -> list[str]:
    cpu, *others = (result.median(figure) for figure in _FIGURES)
    times = None if cpu is None or not ours or result.server == _OURS else cpu / ours
    return [result.server, *map(number, (cpu, times, *others))]


def _line(text: str) -> str:
    """Return a reason as one line of a page."""
    return " ".join(text.split())[-500:]
