"""PCIe traffic as ``nvidia-smi dmon`` reports it, independent of the bridge's own counters."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

_PROGRAM = "nvidia-smi"
_INTERVAL = 1  # second: dmon's shortest
_SPAN = 1.25 * _INTERVAL
_FIRST_SECONDS = 15.0
_MEGA = 1_000_000


@dataclass(frozen=True, slots=True)
class PcieRate:
    """Bytes per second over PCIe, as the GPU sees them: ``received`` from the host, ``sent`` to it."""

    received: float
    sent: float

    def above(self, idle: PcieRate) -> PcieRate:
        """Return what is more than when nothing happens."""
        received, sent = self.received - idle.received, self.sent - idle.sent
        return PcieRate(max(0.0, received), max(0.0, sent))


class PcieMeter:
    """A running ``nvidia-smi dmon -s t``, read by a thread; a context manager."""

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, PcieRate]] = []
        self._more = threading.Condition()
        self._ended = False
        self.refusal = ""
        # A terminal, for which it writes each line at once; into a pipe it may keep them.
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

    def __enter__(self) -> PcieMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program, and what it may have started: each of them keeps the terminal open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def has(self, count: int, since: float) -> bool:
        """Return whether there are so many samples since a moment, or no more will come."""
        with self._more:
            return self._ended or len(self._within(since, float("inf"))) >= count

    def wait_for(self, count: int, since: float, seconds: float) -> bool:
        """Wait until so many samples fall into the time since a moment; False if they do not come."""

        def enough() -> bool:
            hopeless = self._ended or bool(self.refusal)
            return hopeless or len(self._within(since, float("inf"))) >= count

        with self._more:
            self._more.wait_for(enough, seconds)
            return len(self._within(since, float("inf"))) >= count

    def rate(self, since: float, until: float) -> PcieRate | None:
        """Return the mean of the samples between two moments; None if there are none."""
        with self._more:
            found = self._within(since, until)
        if not found:
            return None
        return PcieRate(
            statistics.fmean(rate.received for rate in found),
            statistics.fmean(rate.sent for rate in found),
        )

    def _within(self, since: float, until: float) -> list[PcieRate]:
        # A sample tells of the time before it, and is not always there at once.
        return [rate for at, rate in self._samples if since + _SPAN <= at <= until]

    def _read(self, terminal: int) -> None:
        columns: list[str] = []
        said = ""
        # A terminal whose other end is closed gives an error, not an end.
        with os.fdopen(terminal, errors="replace") as lines, contextlib.suppress(OSError):
            for line in lines:
                said = line.strip() or said
                words = line.split()
                if line.startswith("#"):
                    heading = line[1:].split()
                    # The line below it has the units.
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


def open_pcie_meter(device: str) -> PcieMeter | str:
    """Start to look at a device's PCIe link, by its UUID; returns the reason where that fails."""
    if shutil.which(_PROGRAM) is None:
        return f"{_PROGRAM} is not on PATH"
    began = time.monotonic()
    try:
        meter = PcieMeter(device)
    except OSError as error:
        return f"{_PROGRAM} dmon cannot be started: {error}"
    if meter.wait_for(1, began - _SPAN, _FIRST_SECONDS):
        return meter
    reason = meter.refusal or f"no figure after {_FIRST_SECONDS:.0f} s"
    meter.close()
    return f"{_PROGRAM} dmon: {reason}"


def gpu_memory_of(pids: Iterable[int]) -> dict[int, int] | str:
    """Return the MiB that processes hold on GPUs, or why nobody tells, as in a container."""
    wanted = set(pids)
    query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            [_PROGRAM, *query], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{_PROGRAM} does not tell: {error}"
    found: dict[int, int] = {}
    for line in asked.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit() and used.strip().isdigit() and int(pid) in wanted:
            found[int(pid)] = found.get(int(pid), 0) + int(used)
    return found or f"{_PROGRAM} knows none of these processes, as in a container"
