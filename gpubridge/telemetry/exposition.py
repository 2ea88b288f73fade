"""Prometheus' text format of metrics.

The prometheus-client library appends ``_total`` to the name of every counter, which Triton's counters and
existing dashboards do not have.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """A metric, "counter", "gauge", "histogram" or "summary", and its samples."""

    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.samples: list[tuple[str, Mapping[str, str], float]] = []

    def add(self, labels: Mapping[str, str], value: float, suffix: str = "") -> None:
        """Add a sample; ``suffix`` is that of a part of a histogram or summary."""
        self.samples.append((self.name + suffix, labels, value))


def render(families: Iterable[Family]) -> bytes:
    """Return the page of these families without empty ones."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        text = family.text.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n")
        for name, labels, value in family.samples:
            listed = ",".join(
                f'{key}="{_quoted(labels[key])}"' for key in sorted(labels, key=_order)
            )
            number = number_text(value)
            lines.append(f"{name}{{{listed}}} {number}\n" if listed else f"{name} {number}\n")
    return "".join(lines).encode(errors="replace")


def number_text(value: float) -> str:
    """Return a number in the format of a page: ``4``, ``0.5``, ``1e+20``, ``NaN``, ``+Inf``."""
    if math.isfinite(value):
        return repr(value).removesuffix(".0")
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _order(label: str) -> tuple[bool, str]:
    """Return the sort key of a label: by name, labels of a family itself last."""
    return label in ("le", "quantile"), label


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
