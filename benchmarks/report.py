"""From samples to a verdict: ratios pair by pair, their median, minimum and aim."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.rows import Row

Sample = dict[str, float]


class Verdict(str, Enum):
    """Verdict of a ratio on its row."""

    AIM = "aim met"
    MINIMUM = "minimum met"
    BELOW = "below minimum"
    NO_MINIMUM = "no minimum set"
    NOT_COMPARED = "not compared"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RowResult:
    """The samples of one row: per round one of gpubridge and, compared, one of Triton."""

    row: Row
    ours: Sequence[Sample] = ()
    theirs: Sequence[Sample] = ()
    failure: str | None = None

    @property
    def our_median(self) -> float | None:
        return median_of(self.ours, self.row.metric)

    @property
    def their_median(self) -> float | None:
        return median_of(self.theirs, self.row.metric)

    @property
    def ratios(self) -> list[float]:
        """gpubridge / Triton of the row's metric, round by round; empty without a peer."""
        if not self.theirs:
            return []
        metric = self.row.metric
        return [
            ours[metric] / theirs[metric]
            for ours, theirs in zip(self.ours, self.theirs, strict=True)
        ]

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios (not the ratio of the medians)."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> Verdict:
        if self.failure is not None:
            return Verdict.FAILED
        if self.ratio is None:
            return Verdict.NOT_COMPARED
        if self.row.minimum is None:
            return Verdict.NO_MINIMUM
        if self.row.aim is not None and _reaches(self.ratio, self.row.aim, self.row):
            return Verdict.AIM
        return (
            Verdict.MINIMUM if _reaches(self.ratio, self.row.minimum, self.row) else Verdict.BELOW
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A run: where and how it was taken, and its rows."""

    started: str
    commit: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    results: Sequence[RowResult] = field(default_factory=list)

    def as_document(self) -> dict[str, Any]:
        """Return the report as what is written to JSON."""
        return {
            "schema": 1,
            "started": self.started,
            "commit": self.commit,
            "machine": self.machine,
            "versions": self.versions,
            "settings": self.settings,
            "rows": [_row_document(result) for result in self.results],
        }


def median_of(samples: Sequence[Sample], metric: str) -> float | None:
    """Return the median of one figure over the rounds; None without rounds."""
    return statistics.median(sample[metric] for sample in samples) if samples else None


def advantage(ratio: float, row: Row) -> float:
    """Return how many times better than Triton a ratio is, whichever way the metric points."""
    return 1 / ratio if row.less_is_better else ratio


def _reaches(ratio: float, bar: float, row: Row) -> bool:
    return ratio <= bar if row.less_is_better else ratio >= bar


def _row_document(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name,
        "title": row.title,
        "metric": row.metric,
        "unit": row.unit,
        "less_is_better": row.less_is_better,
        "minimum": row.minimum,
        "aim": row.aim,
        "gpubridge": {"median": result.our_median, "rounds": list(result.ours)},
        "triton": {"median": result.their_median, "rounds": list(result.theirs)},
        "ratios": result.ratios,
        "ratio": result.ratio,
        "verdict": result.verdict.value,
        "failure": result.failure,
    }
