"""PCIe traffic of a GPU, independent of the bridge's own counters: counted if possible, else sampled."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from typing import NamedTuple, Protocol

from gpubridge.bench.dmon_meter import PcieRate, open_dmon_meter
from gpubridge.bench.nvml import NotCounted

_IDLE_SECONDS = 1.0
_FIRST_SECONDS = 30.0
_LEAST_BITS = 32
_CLEAR_BITS = 64


class PcieMeter(Protocol):
    """A meter that runs until it is closed; moments are of ``time.monotonic``.

    ``kind`` is its name.
    """

    kind: str

    def enough(self, since: float) -> bool:
        """Return whether a row that began at a moment has lasted long enough."""

    def watch_idle(self) -> None:
        """Watch the idle link for as long as a figure takes."""

    def rate(self, since: float, until: float) -> PcieRate | str:
        """Return the traffic between two moments, or the reason why it is unknown."""

    def readings(self, since: float, until: float) -> Readings | None:
        """Return what it has read between two moments; None if it has no counters."""

    def close(self) -> None:
        """Stop the meter."""


class Reading(NamedTuple):
    """Both counters, read between two moments."""

    began: float
    ended: float
    received: int
    sent: int


class Readings(NamedTuple):
    """Readings of counters, their width, and what the link carries at most, bytes per second."""

    bits: int
    fastest: float
    each: list[Reading]


class ByteCounts:
    """Readings of counters that wrap; ``fastest`` is what the link carries at most, bytes per second."""

    def __init__(self, fastest: float) -> None:
        self.fastest = fastest
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Add the next reading."""
        self._readings.append(reading)

    def within(self, since: float, until: float) -> Readings:
        """Return the readings between two moments."""
        found = [each for each in self._readings if since <= each.began and each.ended <= until]
        return Readings(self.bits, self.fastest, found)

    @property
    def bits(self) -> int:
        """The width of the counters, inferred from all readings so far.

        It is 32 while no reading needs more bits: that is right for wider counters, too, unless more
        crosses between two readings.
        """
        largest = max((max(each[2:]) for each in self._readings), default=0)
        if largest < 1 << _LEAST_BITS:
            return _LEAST_BITS
        pairs = itertools.pairwise(self._readings)
        if any(later[k] < first[k] for first, later in pairs for k in (2, 3)):
            return -(-largest.bit_length() // 8) * 8
        return _CLEAR_BITS

    def rate(self, since: float, until: float) -> PcieRate | str:
        """Return the traffic between two moments, or the reason if a counter may have wrapped unnoticed."""
        readings = self.within(since, until).each
        if len(readings) < 2:
            return f"the counters were read {len(readings)} times, expected at least twice"
        pairs = list(itertools.pairwise(readings))
        wraps = 1 << self.bits
        gap = max(later.ended - first.began for first, later in pairs)
        if gap * self.fastest >= wraps:
            return (
                f"its readings lie up to {gap * 1e3:.0f} ms apart, and counters of {self.bits} "
                f"bits may wrap in {wraps / self.fastest * 1e3:.0f} ms"
            )
        received = sum((later.received - first.received) % wraps for first, later in pairs)
        sent = sum((later.sent - first.sent) % wraps for first, later in pairs)
        seconds = readings[-1].ended - readings[0].ended
        return PcieRate(received / seconds, sent / seconds)


class CounterMeter:
    """A running sampler of NVML's counters, read by a thread. Raises NotCounted."""

    kind = "NVML's PCIe byte counters"

    def __init__(self, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpubridge.bench.nvml", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()
        self._counts = ByteCounts(0.0)
        self._refusal = NotCounted(f"NVML does not answer within {_FIRST_SECONDS:.0f} s")
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._begun.wait(_FIRST_SECONDS)
        if not self._counts.fastest:
            self.close()
            raise self._refusal

    def close(self) -> None:
        """End the sampler."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # as it was started
            pipe.close()

    def enough(self, since: float) -> bool:
        """Return true: counters need no number of samples."""
        return time.monotonic() > since

    def watch_idle(self) -> None:
        """Watch the idle link for a second."""
        time.sleep(_IDLE_SECONDS)

    def rate(self, since: float, until: float) -> PcieRate | str:
        """Return the traffic between two moments, or the reason why it is unknown."""
        with self._lock:
            return self._counts.rate(since, until)

    def readings(self, since: float, until: float) -> Readings:
        """Return what it has read between two moments."""
        with self._lock:
            return self._counts.within(since, until)

    def _read(self) -> None:
        assert self._process.stdout is not None  # as it was started
        for line in self._process.stdout:
            first, *others = json.loads(line)
            with self._lock:
                if first == "-":
                    self._refusal = NotCounted(others[0], unmetered=others[1])
                elif others:
                    self._counts.add(Reading(first, *others))
                else:
                    self._counts.fastest = first
            self._begun.set()
        self._begun.set()


def open_pcie_meter(device: str) -> PcieMeter | str:
    """Start a meter of a device's PCIe link, by its UUID, or return the reason why there is none."""
    try:
        return CounterMeter(device)
    except NotCounted as error:
        if error.unmetered:
            return str(error)
        meter = open_dmon_meter(device)
        return f"{error}; {meter}" if isinstance(meter, str) else meter
