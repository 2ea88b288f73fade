"""Report of the benchmark of images on CPUs: figures by side, batch and instances, and two minimums."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.image_load import Figures

__all__ = [
    "BACKEND",
    "MINIMUM",
    "MINIMUM_SCALING",
    "OURS_PILLOW",
    "TRITON",
    "ImageReport",
    "ImageRow",
]

MINIMUM = 1.5
"""Minimum of the backend's images/s over those of Triton's Pillow model."""
MINIMUM_SCALING = 1.8
"""Minimum of two instances' images/s over those of one, each with one thread."""

_CELL = "images/s / p50 ms / p99 ms of a request / ms of CPU time of the server for an image"

BACKEND, OURS_PILLOW, TRITON = "image_preproc", "Pillow model.py", "Triton, Pillow model.py"


@dataclass(slots=True)
class ImageRow:
    """One batch size with one number of instances and of connections; a list of rounds for each side."""

    instances: int
    batch: int
    connections: int
    rounds: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        """True for requests that wait for each other: one alone shows the latency, not the throughput."""
        return self.connections > self.instances

    def median(self, side: str, figure: str = "images") -> float | None:
        """Return the median of a side's rounds; None if it was not measured."""
        taken = self.rounds.get(side)
        return statistics.median(getattr(each, figure) for each in taken) if taken else None

    def ratio(self, side: str, other: str) -> float | None:
        """Return how many times the other's images/s a side has: the median of the rounds' ratios."""
        if not self.rounds.get(side) or not self.rounds.get(other):
            return None
        pairs = zip(self.rounds[side], self.rounds[other], strict=True)
        return statistics.median(mine.images / theirs.images for mine, theirs in pairs)


@dataclass(slots=True)
class ImageReport:
    """A run.

    Attributes
    ----------
    steps : mapping
        Milliseconds of an image in one thread without a server, by step of the Pillow model.
    scaling : list of float
        Images/s of two instances of one thread over those of one, round by round.
    """

    started: str
    commit: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    steps: Mapping[str, float]
    rows: Sequence[ImageRow] = ()
    scaling: list[float] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Figures that had to be reached and were not."""
        found = []
        for row in self.rows:
            ratio = row.ratio(BACKEND, TRITON)
            if ratio is not None and row.loaded and ratio < MINIMUM:
                where = f"{row.instances} instances, batch {row.batch}"
                found.append(f"{where}: {ratio:.2f} times Triton's images/s, expected {MINIMUM}")
        if self.scaling and statistics.median(self.scaling) < MINIMUM_SCALING:
            times = statistics.median(self.scaling)
            found.append(
                f"two instances: {times:.2f} times one instance's images/s, expected {MINIMUM_SCALING}"
            )
        return found

    def as_document(self) -> dict[str, Any]:
        """Return the report as what is written to JSON."""
        return {
            "schema": 1,
            "started": self.started,
            "commit": self.commit,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "pillow_model_ms": dict(self.steps),
            "rows": [
                {
                    "instances": row.instances,
                    "batch": row.batch,
                    "connections": row.connections,
                    "rounds": {
                        side: [each.as_document() for each in rounds]
                        for side, rounds in row.rounds.items()
                    },
                    "times_triton": row.ratio(BACKEND, TRITON),
                    "times_own_pillow": row.ratio(BACKEND, OURS_PILLOW),
                }
                for row in self.rows
            ],
            "two_instances_over_one": self.scaling,
            "complaints": self.complaints,
        }

    def page(self) -> str:
        """Return the page of the run."""
        machine, settings = self.machine, self.settings
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        where += f"{machine['kernel']}, load average before: {machine['load_average']}"
        origin = "Written by `python -m benchmarks.images`, not by hand; what it measures: "
        sides = (BACKEND, OURS_PILLOW, TRITON)
        steps = ", ".join(f"{step} {value:.2f}" for step, value in self.steps.items())
        lines = [
            "# Photographs to tensors on CPUs",
            "",
            f"{origin}[README](../README.md#images).",
            "",
            f"- {where}",
            f"- {versions}",
            f"- commit {self.commit}, {self.started}",
            f"- rounds of {settings['seconds']} s, {settings['rounds']} of each in turn; medians",
            f"- the Pillow model's ms of an image in one thread, without a server: {steps}",
            "",
            f"A cell is {_CELL}.",
            "",
            f"| instances | batch | connections | {' | '.join(sides)} | times Triton | times own Pillow |",
            "|" + "---:|" * (len(sides) + 5),
            *(_line(row) for row in self.rows),
        ]
        if self.scaling:
            times = ", ".join(f"{value:.2f}" for value in self.scaling)
            lines += ["", f"Two instances of one thread over one, round by round: {times}."]
        if self.complaints:
            lines += ["", *(f"- {text}" for text in self.complaints)]
        return "\n".join(lines) + "\n"


def _line(row: ImageRow) -> str:
    cells = [str(number) for number in (row.instances, row.batch, row.connections)]
    for side in (BACKEND, OURS_PILLOW, TRITON):
        times = [_number(row.median(side, name), 1, 1000) for name in ("p50", "p99", "cpu")]
        cells.append(" / ".join([_number(row.median(side), 0), *times]))
    cells += [_number(row.ratio(BACKEND, side), 2) for side in (TRITON, OURS_PILLOW)]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int, divisor: float = 1) -> str:
    return "–" if value is None else f"{value / divisor:.{digits}f}"
