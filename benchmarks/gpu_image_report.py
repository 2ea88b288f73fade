"""Report of the benchmark of images on a GPU: figures by batch, and their share of the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.image_load import Figures

__all__ = ["BY_MODEL", "ON_CPU", "ON_DEVICE", "OVER_HTTP", "SIDES", "GpuImageReport", "GpuImageRow"]

ON_DEVICE, OVER_HTTP, ON_CPU = "pixels stay on the GPU", "pixels over HTTP", "on the CPU"
# The example's model.py in the place of the backend.
BY_MODEL = "by model.py, pixels stay"
SIDES = (ON_DEVICE, BY_MODEL, OVER_HTTP, ON_CPU)

_SHARE = 0.9
_SHARE_FROM = 32


@dataclass(slots=True)
class GpuImageRow:
    """One batch size.

    Attributes
    ----------
    limit : float, optional
        Images/s of nvImageCodec and the kernel in one process.
    torchvision : float, optional
        Images/s of torchvision's decode_jpeg, resize, crop and normalise, all on the GPU.
    served : dict
        What the server reached, by side.
    notes : list of str
        Why something is missing.
    """

    batch: int
    limit: float | None = None
    torchvision: float | None = None
    served: dict[str, Figures] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Share of the limit that is reached from end to end."""
        served = self.served.get(ON_DEVICE)
        return None if served is None or not self.limit else served.images / self.limit


@dataclass(slots=True)
class GpuImageReport:
    """A run on one device."""

    started: str
    commit: str
    device: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    seconds: float
    rows: Sequence[GpuImageRow] = ()

    @property
    def complaints(self) -> list[str]:
        """Figures that had to be reached and were not, or could not be measured."""
        found = [f"batch {row.batch}: {text}" for row in self.rows for text in row.notes]
        found += [
            f"batch {row.batch}: {row.share:.2f} of the limit, expected {_SHARE:g}"
            for row in self.rows
            if row.batch >= _SHARE_FROM and row.share is not None and row.share < _SHARE
        ]
        return found

    def as_document(self) -> dict[str, Any]:
        """Return the report as what is written to JSON."""
        return {
            "schema": 1,
            "started": self.started,
            "commit": self.commit,
            "device": self.device,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "seconds": self.seconds,
            "rows": [
                {
                    "batch": row.batch,
                    "limit_images_per_second": row.limit,
                    "torchvision_images_per_second": row.torchvision,
                    "served": {side: figures.as_document() for side, figures in row.served.items()},
                    "share_of_limit": row.share,
                }
                for row in self.rows
            ],
            "complaints": self.complaints,
        }

    def page(self) -> str:
        """Return the page of the run."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        origin = "Written by `python -m benchmarks.gpu_images`, not by hand; what it measures: "
        headings = ["batch", "limit", "torchvision", *SIDES, "share of the limit"]
        lines = [
            f"# Photographs to tensors on a GPU: {self.device}",
            "",
            f"{origin}[image preprocessing](../../docs/explanation/image-preprocessing.md).",
            "",
            f"- {self.machine['cpu']}, {self.machine['cores']} cores, Linux {self.machine['kernel']}",
            f"- {versions}",
            f"- commit {self.commit}, {self.started}, {self.seconds} s of each",
            "",
            "Images/s; of what is served also p50 and p99 of a request in ms.",
            "",
            f"| {' | '.join(headings)} |",
            "|" + "---:|" * len(headings),
            *(_line(row) for row in self.rows),
        ]
        if self.complaints:
            lines += ["", *(f"- {text}" for text in self.complaints)]
        return "\n".join(lines) + "\n"


def _line(row: GpuImageRow) -> str:
    cells = [str(row.batch), *(_whole(value) for value in (row.limit, row.torchvision))]
    for side in SIDES:
        figures = row.served.get(side)
        cells.append(
            "–"
            if figures is None
            else f"{figures.images:,.0f} / {figures.p50 / 1e3:.1f} / {figures.p99 / 1e3:.1f}"
        )
    cells.append("–" if row.share is None else f"{row.share:.2f}")
    return f"| {' | '.join(cells)} |"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
