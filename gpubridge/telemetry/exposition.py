"""Prometheus' text form of metrics.

Not by the prometheus-client library, which appends ``_total`` to the name of every counter: Triton's
counters do not end so, and existing dashboards ask for them by name.

The form: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["CONTENT_TYPE", "Family", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """A metric and its samples.

    Parameters
    ----------
    name, text : str
    kind : str
        "counter", "gauge", "histogram" or "summary".
    """

    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name = name
        self.text = text
        self.kind = kind
        self.samples: list[tuple[str, Mapping[str, str], float]] = []

    def add(self, labels: Mapping[str, str], value: float, suffix: str = "") -> None:
        """Add a sample; ``suffix`` is that of a part of a histogram or summary."""
        self.samples.append((self.name + suffix, labels, value))


def render(families: Iterable[Family]) -> bytes:
    """Return the page of these families; one without samples is left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        text = family.text.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n")
        for name, labels, value in family.samples:
            listed = ",".join(f'{key}="{_quoted(labels[key])}"' for key in sorted(labels))
            lines.append(f"{name}{{{listed}}} {value}\n" if listed else f"{name} {value}\n")
    return "".join(lines).encode()


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
