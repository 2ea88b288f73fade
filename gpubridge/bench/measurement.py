"""Measurement of one path and size after the other, each under load for a while."""

from __future__ import annotations

import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from gpubridge.bench.device_requests import PATHS, BenchPath, ClientMemory, DeviceRequests
from gpubridge.bench.dmon_meter import PcieRate
from gpubridge.bench.nvml import GpuFacts, gpu_facts
from gpubridge.bench.pcie_meter import PcieMeter, Readings
from gpubridge.bench.processes import BenchProcesses
from gpubridge.bench.server_process import ServerProcess
from gpubridge.cuda_ipc import DeviceInfo

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ELEMENT = 4
_START_SECONDS = 120.0
_POLL_SECONDS = 0.05
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
    """Return a size in the largest unit that it reaches."""
    unit = next(name for name, width in reversed(_UNITS.items()) if nbytes >= width)
    return f"{nbytes / _UNITS[unit]:g} {unit or 'B'}"


class BenchServer(ServerProcess):
    """``gpubridge serve`` with a repository of models, on ports of its choice."""

    def __init__(self, repository: Path, flags: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "gpubridge", "serve"]
        command += ["--http-port=0", "--metrics-port=0", "--allow-grpc=false"]
        command += [f"--model-repository={repository}", *flags]
        super().__init__("the benchmark's server", command, log)
        self.http_port = self.metrics_port = 0

    def wait_ready(self) -> None:
        """Wait until the log says that the server is ready, and read its ports there."""
        while "] ready: " not in (log := self._log.read_text(errors="replace")):
            self.check_start(_START_SECONDS)
            time.sleep(_POLL_SECONDS)
        self.http_port, self.metrics_port = (
            int(re.findall(rf"Started {service} at \S+:(\d+)", log)[0])
            for service in ("HTTPService", "Metrics Service")
        )

    def copied(self) -> dict[str, int]:
        """Return the bytes that the bridge has copied so far, by kind, for all models."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30
        ) as answer:
            page = answer.read().decode()
        found = dict.fromkeys(("host", "h2d", "d2h", "d2d", "p2p"), 0)
        for name, kind, value in _SAMPLE.findall(page):
            if name == "gpubridge_copied_bytes_total":
                found[kind] += int(float(value))
        return found


def time_each(send: Callable[[], object], enough: Callable[[int, float], bool]) -> list[float]:
    """Send requests one after the other until there are enough; return the seconds of each.

    ``enough`` gets the number of requests and the seconds since the beginning.
    """
    samples: list[float] = []
    began = time.perf_counter()
    while not enough(len(samples), time.perf_counter() - began):
        start = time.perf_counter()
        send()
        samples.append(time.perf_counter() - start)
    return samples


@dataclass(frozen=True, slots=True)
class Point:
    """Measurement of one path at one size; quantiles of a request's time are in microseconds.

    - ``began``, ``seconds``: when the load began, by ``time.monotonic``, and how long it lasted.
    - ``copied``: bytes that the bridge has copied by its own counters, by kind.
    - ``pcie``: PCIe traffic above idle; None if it is unknown, for the reason ``no_pcie``.
    - ``gpu_mib``: GPU memory of the server, its models and this client.
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
        """The bytes of all inputs and outputs."""
        return 2 * self.nbytes * self.requests

    @property
    def crossed(self) -> float | None:
        """The bytes that crossed PCIe above idle, both ways."""
        if self.pcie is None:
            return None
        return (self.pcie.received + self.pcie.sent) * self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """All rows of a run so far; ``no_pcie`` and ``no_memory`` are the reasons why those figures are missing.

    - ``others``: the pids of other processes that used the GPU.
    - ``planned``: the number of rows of the whole run.
    - ``meter``, ``readings``: the kind of PCIe's meter, and what it has read since the idle link was watched.
    - ``watched``: when that was, by ``time.monotonic``, which ``wall`` seconds more make a time of day.
    """

    device: DeviceInfo
    idle: PcieRate | None
    points: Sequence[Point]
    no_pcie: str
    no_memory: str
    others: Sequence[int] = ()
    planned: int = 0
    meter: str = ""
    readings: Readings | None = None
    watched: tuple[float, float] = (0.0, 0.0)
    wall: float = 0.0
    facts: GpuFacts | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement: each path at every size, multiples of four bytes, under load for so many seconds."""

    sizes: Sequence[int]
    seconds: float
    paths: Sequence[BenchPath] = PATHS


def measure(
    device: DeviceInfo,
    plan: Plan,
    meter: PcieMeter | str,
    *,
    models: Path = MODELS,
    tell: Callable[[str], object] = lambda _: None,
    keep: Callable[[Measured], object] = lambda _: None,
) -> None:
    """Start a server and measure; rows last longer than planned if the meter needs more samples.

    ``meter`` may be the reason why there is none; ``keep`` gets what there is after each row. Raises BridgeError
    if the server does not start, or a request fails or is answered wrongly.
    """
    largest = max(plan.sizes)
    watch = None if isinstance(meter, str) else meter
    progress = _Progress(device, meter, len(plan.paths) * len(plan.sizes))
    with (
        tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder,
        ClientMemory(device, largest) as memory,
        BenchServer(models, _flags(largest), Path(folder) / "log") as server,
    ):
        server.wait_ready()
        with DeviceRequests("gpubridge", server.http_port, memory) as requests:
            progress.watch_idle()
            # An interrupt leaves whole sizes, each with its control.
            for nbytes in plan.sizes:
                for path in plan.paths:
                    tell(f"{path.title}, {size_text(nbytes)} ...")
                    point = _Load(path, nbytes, plan.seconds).run(requests, server, watch)
                    progress.add(point, server.pid)
                    keep(progress.measured())


class _Progress:
    """The rows so far, and the meter that has watched them."""

    def __init__(self, device: DeviceInfo, meter: PcieMeter | str, planned: int) -> None:
        self._device, self._planned = device, planned
        self._no_pcie = meter if isinstance(meter, str) else ""
        self._watch = None if isinstance(meter, str) else meter
        self._seen = BenchProcesses(device.uuid)
        self._facts = gpu_facts(device.uuid)
        self._wall = datetime.now(timezone.utc).timestamp() - time.monotonic()
        self._points: list[Point] = []
        self._idle = (0.0, 0.0)

    def watch_idle(self) -> None:
        """Watch the idle link, if there is a meter."""
        began = time.monotonic()
        if self._watch is not None:
            self._watch.watch_idle()
        self._idle = began, time.monotonic()

    def add(self, point: Point, server: int) -> None:
        """Add a row, with the GPU memory of the server's processes and this one."""
        # Only now: a model takes device memory on first use.
        self._points.append(replace(point, gpu_mib=self._seen.held_by(server)))

    def measured(self) -> Measured:
        """Return the rows with what the meter says of them: all readings together show the width of its counters."""
        found = Measured(
            self._device,
            None,
            list(self._points),
            self._no_pcie,
            self._seen.absence,
            sorted(self._seen.others),
            self._planned,
            watched=self._idle,
            wall=self._wall,
            facts=self._facts,
        )
        if self._watch is None:
            return found
        readings = self._watch.readings(self._idle[0], time.monotonic())
        found = replace(found, meter=self._watch.kind, readings=readings)
        idle = self._watch.rate(*self._idle)
        if isinstance(idle, str):
            return replace(found, no_pcie=f"of the idle link: {idle}")
        points = [_metered(point, self._watch, idle) for point in found.points]
        return replace(found, idle=idle, points=points)


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


@dataclass(frozen=True, slots=True)
class _Load:
    """The load of one path at one size."""

    path: BenchPath
    nbytes: int
    seconds: float

    def run(
        self,
        requests: DeviceRequests,
        server: BenchServer,
        watch: PcieMeter | None,
    ) -> Point:
        model, way = self.path.model, self.path.way
        requests.check(model, way, self.nbytes)
        send = requests.prepared(model, way, self.nbytes)
        send()
        before = server.copied()
        began = time.monotonic()
        samples = time_each(send, lambda sent, seconds: self._enough(sent, seconds, began, watch))
        ended = time.monotonic()
        after = server.copied()
        p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]) * 1e6)
        # Check once more that the copied bytes are the right ones.
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

    def _enough(self, sent: int, seconds: float, began: float, watch: PcieMeter | None) -> bool:
        if seconds < self.seconds or sent < _LEAST_REQUESTS:
            return False
        return watch is None or watch.enough(began)
