"""PCIe traffic as ``nvidia-smi dmon`` reports it, for drivers that do not count bytes.

Once a second it reports a rate that the driver has measured for 20 ms: a figure takes ten of them, and
shows only the order of magnitude.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

_PROGRAM = "nvidia-smi"
_INTERVAL = 1  # second: dmon's shortest
_SPAN = 1.25 * _INTERVAL
_FIRST_SECONDS = 15.0
_MEGA = 1_000_000
_SAMPLES = 10
_PATIENCE = 5.0  # beyond the seconds that so many samples take


@dataclass(frozen=True, slots=True)
class PcieRate:
    """Bytes per second over PCIe, as the GPU sees them: ``received`` from the host, ``sent`` to it."""

    received: float
    sent: float

    def above(self, idle: PcieRate) -> PcieRate:
        """Return the excess over an idle link's traffic."""
        received, sent = self.received - idle.received, self.sent - idle.sent
        return PcieRate(max(0.0, received), max(0.0, sent))


class DmonMeter:
    """A running ``nvidia-smi dmon -s t``, read by a thread."""

    kind = "nvidia-smi dmon"

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, PcieRate]] = []
        self._more = threading.Condition()
        self._ended = False
        self.refusal = ""
        # It writes each line to a terminal at once, and may buffer lines to a pipe.
        terminal, its_end = os.openpty()
        try:
            self._process = subprocess.Popen(
                [_PROGRAM, "dmon", "-s", "t", "-d", str(_INTERVAL), "-i", device],
                stdin=subprocess.DEVNULL,
                stdout=its_end,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(terminal)
            raise
        finally:
            os.close(its_end)
        self._reader = threading.Thread(target=self._read, args=(terminal,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Kill the program and its children, each of which keeps the terminal open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def enough(self, since: float) -> bool:
        """Return whether there are enough samples since a moment, or no more are expected."""
        late = time.monotonic() > since + _SAMPLES * _INTERVAL + _PATIENCE
        with self._more:
            return self._ended or late or len(self._within(since, float("inf"))) >= _SAMPLES

    def watch_idle(self) -> None:
        """Watch the idle link for as long as a figure takes."""
        self.wait_for(_SAMPLES, time.monotonic(), _SAMPLES * _INTERVAL + _PATIENCE)

    def wait_for(self, count: int, since: float, seconds: float) -> bool:
        """Wait for ``count`` samples since a moment; return False if they do not come."""

        def enough() -> bool:
            hopeless = self._ended or bool(self.refusal)
            return hopeless or len(self._within(since, float("inf"))) >= count

        with self._more:
            self._more.wait_for(enough, seconds)
            return len(self._within(since, float("inf"))) >= count

    def rate(self, since: float, until: float) -> PcieRate | str:
        """Return the mean of the samples between two moments, or the reason if there are too few."""
        with self._more:
            found = self._within(since, until)
        if len(found) < _SAMPLES:
            return f"nvidia-smi dmon gave {len(found)} samples, expected at least {_SAMPLES}"
        return PcieRate(
            statistics.fmean(rate.received for rate in found),
            statistics.fmean(rate.sent for rate in found),
        )

    def readings(self, since: float, until: float) -> None:
        """Return None: it has no counters."""

    def _within(self, since: float, until: float) -> list[PcieRate]:
        # A sample describes the time before it, and may come late.
        return [rate for at, rate in self._samples if since + _SPAN <= at <= until]

    def _read(self, terminal: int) -> None:
        columns: list[str] = []
        said = ""
        # Reading a terminal whose other end is closed raises an error.
        with os.fdopen(terminal, errors="replace") as lines, contextlib.suppress(OSError):
            for line in lines:
                said = line.strip() or said
                words = line.split()
                if line.startswith("#"):
                    heading = line[1:].split()
                    # The next line has the units.
                    columns = heading if heading[:1] == ["gpu"] else columns
                elif words and words[0].isdigit():
                    self._take(columns, words)
        with self._more:
            self._ended = True
            if not self._samples:
                self.refusal = self.refusal or said or "it ended and said nothing"
            self._more.notify_all()

    def _take(self, columns: list[str], words: list[str]) -> None:
        values = dict(zip(columns, words, strict=False))
        try:
            rate = PcieRate(*(float(values[name]) * _MEGA for name in ("rxpci", "txpci")))
        except (KeyError, ValueError):
            with self._more:
                self.refusal = f"the driver does not tell PCIe rates: {' '.join(words)}"
                self._more.notify_all()
            return
        with self._more:
            self._samples.append((time.monotonic(), rate))
            self._more.notify_all()


def open_dmon_meter(device: str) -> DmonMeter | str:
    """Start a meter of a device's PCIe link, by its UUID, or return the reason why there is none."""
    if shutil.which(_PROGRAM) is None:
        return f"{_PROGRAM} is not on PATH"
    began = time.monotonic()
    try:
        meter = DmonMeter(device)
    except OSError as error:
        return f"{_PROGRAM} dmon cannot be started: {error}"
    if meter.wait_for(1, began - _SPAN, _FIRST_SECONDS):
        return meter
    reason = meter.refusal or f"no figure after {_FIRST_SECONDS:.0f} s"
    meter.close()
    return f"{_PROGRAM} dmon: {reason}"
