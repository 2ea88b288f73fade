"""A measurement as a document, which `gpubridge.bench.verify` reads without trusting the bridge's counters."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gpubridge
from gpubridge.bench.measurement import Measured, Point
from gpubridge.bench.pcie_meter import Readings
from gpubridge.bench.report import Verdict

_SCHEMA = 2


def document(measured: Measured, verdict: Verdict) -> dict[str, Any]:
    """Return everything, for JSON; bytes are those of all requests of a row together, times of day are of UTC."""
    device, idle, facts = measured.device, measured.idle, measured.facts
    began, ended = measured.watched
    return {
        "schema": _SCHEMA,
        "gpubridge": gpubridge.__version__,
        "device": {"name": device.name, "uuid": device.uuid, "bytes": device.nbytes},
        "driver": None if facts is None else facts.driver,
        "nvidia_smi_index": None if facts is None else facts.number,
        "link": None
        if facts is None
        else {
            "generation": facts.generation,
            "width": facts.width,
            "most_generation": facts.most_generation,
            "most_width": facts.most_width,
        },
        "meter": measured.meter,
        "pcie_idle": None if idle is None else _rate(idle.received, idle.sent),
        "pcie_idle_began": _time(began, measured),
        "pcie_idle_ended": _time(ended, measured),
        "pcie_unseen": measured.no_pcie,
        "gpu_memory_unseen": measured.no_memory,
        "other_processes": list(measured.others),
        "rows_planned": measured.planned,
        "rows": [_row(point, measured) for point in measured.points],
        "holds": verdict.holds,
        "failures": verdict.failures,
        "doubts": verdict.doubts,
        "counters": None if measured.readings is None else _raw(measured.readings, measured),
    }


def write_document(document: dict[str, Any], target: Path) -> None:
    """Write it as JSON; an interrupt leaves the one that was there before."""
    written = target.with_suffix(".new")
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    written.replace(target)


def _rate(received: float, sent: float) -> dict[str, float]:
    return {"received_bytes_per_second": received, "sent_bytes_per_second": sent}


def _raw(readings: Readings, measured: Measured) -> dict[str, Any]:
    """Return the counters as they were read: a line each, which wraps at the width."""
    return {
        "bits": readings.bits,
        "link_bytes_per_second": readings.fastest,
        "columns": "time of day before and after the reading, received, sent",
        "readings": [
            f"{each.began + measured.wall:.4f} {each.ended + measured.wall:.4f} {each.received} {each.sent}"
            for each in readings.each
        ],
    }


def _row(point: Point, measured: Measured) -> dict[str, Any]:
    raw = None if measured.readings is None else measured.readings.each
    ended = point.began + point.seconds
    within = [each for each in raw or () if point.began <= each.began and each.ended <= ended]
    return {
        "path": point.path.name,
        "title": point.path.title,
        "stays": point.path.stays,
        "bytes": point.nbytes,
        "requests": point.requests,
        "began": _time(point.began, measured),
        "ended": _time(ended, measured),
        "seconds": point.seconds,
        "p50_us": point.p50,
        "p99_us": point.p99,
        "handed_bytes": point.handed,
        "copied_bytes": point.copied,
        "pcie_above_idle": (
            None if point.pcie is None else _rate(point.pcie.received, point.pcie.sent)
        ),
        "pcie_bytes": point.crossed,
        "pcie_unseen": point.no_pcie,
        "counters_first": list(within[0][2:]) if within else None,
        "counters_last": list(within[-1][2:]) if within else None,
        "gpu_mib": point.gpu_mib,
    }


def _time(moment: float, measured: Measured) -> str:
    """Return a moment of ``time.monotonic`` as a time of day."""
    return datetime.fromtimestamp(moment + measured.wall, timezone.utc).isoformat()
