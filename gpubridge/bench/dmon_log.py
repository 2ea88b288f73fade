"""Samples in the log of ``nvidia-smi dmon -o DT``, whose times are of UTC."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple

_MEGA = 1_000_000


class DmonSample(NamedTuple):
    """Bytes per second over PCIe, as a GPU sees them; ``at``: seconds of the epoch, a whole number."""

    at: float
    received: float
    sent: float


def read_dmon_log(text: str, index: int) -> list[DmonSample]:
    """Return the samples of one GPU, by the number that nvidia-smi gives it; lines without rates are left out."""
    found = []
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#"):
            heading = line[1:].split()
            # The next line has the units.
            columns = heading if "gpu" in heading else columns
            continue
        values = dict(zip(columns, words, strict=False))
        try:
            if int(values["gpu"]) != index:
                continue
            when = datetime.strptime(f"{values['Date']} {values['Time']}+0000", "%Y%m%d %H:%M:%S%z")
            rates = (float(values[name]) * _MEGA for name in ("rxpci", "txpci"))
            found.append(DmonSample(when.astimezone(timezone.utc).timestamp(), *rates))
        except (KeyError, ValueError):
            continue
    return found
