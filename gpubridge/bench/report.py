"""The figures as a table, and as a document."""

from __future__ import annotations

from typing import Any

import gpubridge
from gpubridge.bench.measurement import Measured, Point
from gpubridge.bench.sizes import size_text
from gpubridge.bench.verdict import Verdict

__all__ = ["document", "table"]

_HEADINGS = (
    "path",
    "size",
    "requests",
    "p50 us",
    "p99 us",
    "handed",
    "host",
    "h2d",
    "d2h",
    "d2d",
    "PCIe in",
    "PCIe out",
    "GPU MiB",
)
_LEGEND = (
    "handed: bytes of input and output of one request; host, h2d, d2h, d2d: of these the bridge\n"
    "copied; PCIe in, out: what the GPU received and sent above idle, by nvidia-smi, for a request"
)


def table(measured: Measured) -> str:
    """Return the figures of every path and size; bytes are those of one request."""
    rows = [_HEADINGS, *(_cells(point) for point in measured.points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{measured.device.name} ({measured.device.uuid})"]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    lines.append(_LEGEND)
    if measured.no_memory:
        lines.append(f"GPU MiB of server, models and client: {measured.no_memory}")
    return "\n".join(lines)


def document(measured: Measured, verdict: Verdict) -> dict[str, Any]:
    """Return everything, for JSON; bytes are those of all requests of a row together."""
    device, idle = measured.device, measured.idle
    return {
        "schema": 1,
        "gpubridge": gpubridge.__version__,
        "device": {"name": device.name, "uuid": device.uuid, "bytes": device.nbytes},
        "pcie_idle": None if idle is None else _rate(idle.received, idle.sent),
        "pcie_unseen": measured.no_pcie,
        "gpu_memory_unseen": measured.no_memory,
        "rows": [_row(point) for point in measured.points],
        "holds": verdict.holds,
        "failures": verdict.failures,
        "doubts": verdict.doubts,
    }


def _rate(received: float, sent: float) -> dict[str, float]:
    return {"received_bytes_per_second": received, "sent_bytes_per_second": sent}


def _row(point: Point) -> dict[str, Any]:
    return {
        "path": point.path.name,
        "title": point.path.title,
        "bytes": point.nbytes,
        "requests": point.requests,
        "seconds": point.seconds,
        "p50_us": point.p50,
        "p99_us": point.p99,
        "handed_bytes": point.handed,
        "copied_bytes": point.copied,
        "pcie_above_idle": (
            None if point.pcie is None else _rate(point.pcie.received, point.pcie.sent)
        ),
        "pcie_bytes": point.crossed,
        "gpu_mib": point.gpu_mib,
    }


def _cells(point: Point) -> tuple[str, ...]:
    each = (point.copied[kind] / point.requests for kind in ("host", "h2d", "d2h", "d2d"))
    pcie = ("-", "-")
    if point.pcie is not None:
        seconds = point.seconds / point.requests
        pcie = (_amount(point.pcie.received * seconds), _amount(point.pcie.sent * seconds))
    return (
        point.path.title,
        size_text(point.nbytes),
        str(point.requests),
        f"{point.p50:,.0f}",
        f"{point.p99:,.0f}",
        size_text(2 * point.nbytes),
        *map(_amount, each),
        *pcie,
        "-" if point.gpu_mib is None else str(point.gpu_mib),
    )


def _amount(nbytes: float) -> str:
    """Return a number of bytes to three digits."""
    if nbytes < 1:
        return "0"
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= width:
            return f"{nbytes / width:.3g} {unit}"
    return f"{nbytes:.0f} B"
