"""Takes the figures: one path and size after the other, each under load for a while."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpubridge.bench.device_requests import PATHS, BenchPath, ClientMemory, DeviceRequests
from gpubridge.bench.gpu_processes import processes_on
from gpubridge.bench.pcie_meter import PcieMeter
from gpubridge.bench.pcie_rate import PcieRate
from gpubridge.cuda_ipc import DeviceInfo
from gpubridge.errors import unavailable

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ELEMENT = 4
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LINES = 12
_SAMPLE = re.compile(r'^(\w+)\{.*?kind="(\w+)".*\} (\S+)$', re.MULTILINE)
MODELS = Path(__file__).parent / "model_repository"
_MIB = 1 << 20
_LEAST_REQUESTS = 5
_ARENA = 32 * _MIB
_LIMIT = 1024 * _MIB


def read_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a list such as ``64KiB,1MiB``; ValueError with what was expected."""
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)\s*([KMG]iB|)", word.strip())
        nbytes = int(found[1]) * _UNITS[found[2]] if found else 0
        if nbytes < _ELEMENT or nbytes % _ELEMENT:
            raise ValueError(
                f"expected sizes such as 64KiB,1MiB,1GiB, multiples of {_ELEMENT} bytes, got "
                f"{word.strip()!r}"
            )
        sizes.append(nbytes)
    return tuple(sizes)


def size_text(nbytes: int) -> str:
    """Return a size in the largest unit that it has one of."""
    unit = next(name for name, width in reversed(_UNITS.items()) if nbytes >= width)
    return f"{nbytes / _UNITS[unit]:g} {unit or 'B'}"


class OwnServer:
    """``gpubridge serve`` in a process of its own; a context manager."""

    def __init__(self, repository: Path, flags: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "gpubridge", "serve"]
        self._command += ["--http-port=0", "--metrics-port=0", "--allow-grpc=false"]
        self._command += [f"--model-repository={repository}", *flags]
        self._folder = tempfile.TemporaryDirectory(prefix="gpubridge-bench-")
        self._log = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.http_port = self.metrics_port = 0

    def __enter__(self) -> OwnServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the server; its stubs are its children."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """Stop the server and remove its log; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # Its stubs end with it.
                process.kill()
                process.wait()
        self._folder.cleanup()

    def copied(self) -> dict[str, int]:
        """Return the bytes that the bridge has copied so far, by kind, for all models."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = dict.fromkeys(("host", "h2d", "d2h", "d2d", "p2p"), 0)
        for name, kind, value in _SAMPLE.findall(page):
            if name == "gpubridge_copied_bytes_total":
                found[kind] += int(float(value))
        return found

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while "] ready: " not in (log := self._log.read_text(errors="replace")):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                last = "\n".join(log.splitlines()[-_LINES:])
                what = "ended" if ended else f"was not ready after {_START_SECONDS:.0f} s"
                raise unavailable(f"the benchmark's server {what}; its log:\n{last}")
            time.sleep(_POLL_SECONDS)
        self.http_port, self.metrics_port = (
            int(re.findall(rf"Started {door} at \S+:(\d+)", log)[0])
            for door in ("HTTPService", "Metrics Service")
        )


@dataclass(frozen=True, slots=True)
class Point:
    """Measurement of one path at one size; quantiles of a request's time are in microseconds.

    - ``began``, ``seconds``: when its load began, by ``time.monotonic``, and how long it lasted.
    - ``copied``: bytes that the bridge says that it has copied, by kind.
    - ``pcie``: over PCIe above idle; None where it is unknown, and ``no_pcie`` says why.
    - ``gpu_mib``: what the server, its models and this client hold on the GPU.
    """

    path: BenchPath
    nbytes: int
    requests: int
    began: float
    seconds: float
    p50: float
    p99: float
    copied: dict[str, int]
    gpu_mib: int | None = None
    pcie: PcieRate | None = None
    no_pcie: str = ""

    @property
    def handed(self) -> int:
        """The bytes that the client handed over and got back."""
        return 2 * self.nbytes * self.requests

    @property
    def crossed(self) -> float | None:
        """The bytes that PCIe saw above idle, both ways."""
        if self.pcie is None:
            return None
        return (self.pcie.received + self.pcie.sent) * self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """A whole run; ``no_pcie`` and ``no_memory`` say why there are no such figures, if so.

    ``others`` are processes that used the GPU too, by their pids.
    """

    device: DeviceInfo
    idle: PcieRate | None
    points: Sequence[Point]
    no_pcie: str
    no_memory: str
    others: Sequence[int] = ()


def measure(
    device: DeviceInfo,
    sizes: Sequence[int],
    seconds: float,
    meter: PcieMeter | str,
    *,
    models: Path = MODELS,
    tell: Callable[[str], object] = lambda _: None,
) -> Measured:
    """Start a server and measure every path at every size, multiples of four bytes.

    Each gets ``seconds`` of load, more while the meter (or the reason why there is none) has too
    few samples. Raises BridgeError: the server does not start, or a request fails or is answered
    wrongly.
    """
    largest = max(sizes)
    no_pcie, watch = (meter, None) if isinstance(meter, str) else ("", meter)
    seen = _Processes(device.uuid)
    with ClientMemory(device, largest) as memory, OwnServer(models, _flags(largest)) as server:
        requests = DeviceRequests("gpubridge", server.http_port, memory)
        try:
            idle_since = time.monotonic()
            if watch is not None:
                watch.watch_idle()
            idle_until = time.monotonic()
            points = []
            for path in PATHS:
                for nbytes in sizes:
                    tell(f"{path.title}, {size_text(nbytes)} ...")
                    point = _Load(path, nbytes, seconds).run(requests, server, watch)
                    # Not before: a model takes nothing of the device until it needs it.
                    points.append(replace(point, gpu_mib=seen.held_by(server.pid)))
        finally:
            requests.close()
    if watch is None:
        return Measured(device, None, points, no_pcie, seen.absence, sorted(seen.others))
    # Not before: all rows together, the host's too, show how wide the counters are.
    idle = watch.rate(idle_since, idle_until)
    if isinstance(idle, str):
        reason = f"of the idle link: {idle}"
        return Measured(device, None, points, reason, seen.absence, sorted(seen.others))
    points = [_metered(point, watch, idle) for point in points]
    return Measured(device, idle, points, "", seen.absence, sorted(seen.others))


def _metered(point: Point, watch: PcieMeter, idle: PcieRate) -> Point:
    found = watch.rate(point.began, point.began + point.seconds)
    if isinstance(found, str):
        return replace(point, no_pcie=found)
    return replace(point, pcie=found.above(idle))


def _flags(largest: int) -> list[str]:
    limit = max(_LIMIT, 4 * largest)
    return [
        "--allow-client-shm=true",
        f"--http-max-input-size={largest + _MIB}",
        f"--request-arena-limit={limit}",
        f"--output-arena-limit={limit}",
        f"--backend-config=python,device-arena-bytes={max(_ARENA, 2 * largest)}",
    ]


class _Processes:
    """The processes on a device: ours, which hold memory, and ``others``, which disturb.

    ``absence`` says why ours are not known, if so: in a container their pids may be other ones.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.absence = ""
        # Nothing of the benchmark is on the device yet.
        found = processes_on(device)
        self.others = set() if isinstance(found, str) else set(found) - {os.getpid()}

    def held_by(self, server: int) -> int | None:
        """Return the MiB of GPU memory of all processes that take part; None where it is unknown."""
        # Some end meanwhile: a server tries what works on the device in processes of its own.
        family = {os.getpid(), *_family(server)}
        found = processes_on(self._device)
        if isinstance(found, str):
            self.absence = found
            return None
        ours = found.keys() & (family | _family(server))
        if not ours:
            self.absence = "nvidia-smi knows none of these processes, as in a container"
            return None
        self.others |= found.keys() - ours
        return sum(found[pid] for pid in ours)


def _family(pid: int) -> set[int]:
    """Return a process and all that descend from it."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in task.read_text().split():
                found |= _family(int(child))
    return found


@dataclass(frozen=True, slots=True)
class _Load:
    """The load of one path at one size."""

    path: BenchPath
    nbytes: int
    seconds: float

    def run(
        self,
        requests: DeviceRequests,
        server: OwnServer,
        watch: PcieMeter | None,
    ) -> Point:
        model, way = self.path.model, self.path.way
        requests.check(model, way, self.nbytes)
        send = requests.prepared(model, way, self.nbytes)
        send()
        before = server.copied()
        began = time.monotonic()
        samples: list[float] = []
        while not self._enough(len(samples), began, watch):
            start = time.perf_counter()
            send()
            samples.append(time.perf_counter() - start)
        ended = time.monotonic()
        after = server.copied()
        p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]) * 1e6)
        # Whether the bytes that were copied are the right ones, once more.
        requests.check(model, way, self.nbytes)
        return Point(
            self.path,
            self.nbytes,
            len(samples),
            began,
            ended - began,
            p50,
            p99,
            {kind: after[kind] - before[kind] for kind in after},
        )

    def _enough(self, sent: int, began: float, watch: PcieMeter | None) -> bool:
        if time.monotonic() - began < self.seconds or sent < _LEAST_REQUESTS:
            return False
        return watch is None or watch.enough(began)
