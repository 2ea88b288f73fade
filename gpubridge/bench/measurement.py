"""Takes the figures: one path and size after the other, each under load for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpubridge.bench.client_memory import ClientMemory
from gpubridge.bench.device_requests import DeviceRequests
from gpubridge.bench.own_server import OwnServer
from gpubridge.bench.paths import PATHS, BenchPath
from gpubridge.bench.pcie_meter import PcieMeter, PcieRate, gpu_memory_of
from gpubridge.bench.sizes import size_text
from gpubridge.cuda_ipc import DeviceInfo

__all__ = ["MODELS", "Measured", "Point", "measure"]

MODELS = Path(__file__).parent / "model_repository"

_MIB = 1 << 20
_SAMPLES = 2
_PATIENCE = 8.0
_IDLE_SAMPLES = 3
_LEAST_REQUESTS = 5
_ARENA = 32 * _MIB
_LIMIT = 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Point:
    """What was seen of one path at one size.

    Attributes
    ----------
    nbytes : int
        Of the input, and of the output.
    seconds : float
        That the requests took together.
    p50, p99 : float
        Microseconds of a request.
    copied : dict
        Bytes that the bridge says that it has copied, by kind.
    pcie : PcieRate, optional
        Over PCIe above idle; None where nobody tells.
    gpu_mib : int, optional
        What the server, its models and this client hold on the GPU.
    """

    path: BenchPath
    nbytes: int
    requests: int
    seconds: float
    p50: float
    p99: float
    copied: dict[str, int]
    pcie: PcieRate | None
    gpu_mib: int | None

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
    """A whole run.

    Attributes
    ----------
    no_pcie, no_memory : str
        Why there is no figure of PCIe, or of processes' memory; empty where there is.
    """

    device: DeviceInfo
    idle: PcieRate | None
    points: Sequence[Point]
    no_pcie: str
    no_memory: str


def measure(
    device: DeviceInfo,
    sizes: Sequence[int],
    seconds: float,
    meter: PcieMeter | str,
    *,
    models: Path = MODELS,
    tell: Callable[[str], object] = lambda _: None,
) -> Measured:
    """Start a server and measure every path at every size.

    Parameters
    ----------
    device : DeviceInfo
        The first of this process.
    sizes : sequence of int
        Bytes of a tensor, multiples of four.
    seconds : float
        Of load for each path and size; longer while the meter has too few samples.
    meter : PcieMeter or str
        Or why there is none.
    models : Path
        A repository like this package's.
    tell : callable
        Is told what happens.

    Raises
    ------
    BridgeError
        The server does not start, a request fails, or an answer is wrong.
    """
    largest = max(sizes)
    no_pcie, watch = (meter, None) if isinstance(meter, str) else ("", meter)
    with ClientMemory(device, largest) as memory, OwnServer(models, _flags(largest)) as server:
        requests = DeviceRequests("gpubridge", server.http_port, memory)
        try:
            idle = _idle(watch)
            points, no_memory = [], ""
            for path in PATHS:
                for nbytes in sizes:
                    tell(f"{path.title}, {size_text(nbytes)} ...")
                    held = _held(server)
                    no_memory = held if isinstance(held, str) else ""
                    load = _Load(path, nbytes, seconds, held if isinstance(held, int) else None)
                    points.append(load.run(requests, server, watch, idle))
        finally:
            requests.close()
    return Measured(device, idle, points, no_pcie, no_memory)


def _flags(largest: int) -> list[str]:
    limit = max(_LIMIT, 4 * largest)
    return [
        "--allow-client-shm=true",
        f"--http-max-input-size={largest + _MIB}",
        f"--request-arena-limit={limit}",
        f"--output-arena-limit={limit}",
        f"--backend-config=python,device-arena-bytes={max(_ARENA, 2 * largest)}",
    ]


def _idle(watch: PcieMeter | None) -> PcieRate | None:
    """Return what crosses PCIe while nobody asks for anything."""
    if watch is None:
        return None
    began = time.monotonic()
    watch.wait_for(_IDLE_SAMPLES, began, _PATIENCE)
    return watch.rate(began, time.monotonic())


def _held(server: OwnServer) -> int | str:
    """Return the MiB of GPU memory of all who take part, or why nobody tells."""
    found = gpu_memory_of([os.getpid(), server.pid, *_children(server.pid)])
    return found if isinstance(found, str) else sum(found.values())


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


@dataclass(frozen=True, slots=True)
class _Load:
    """The load of one path at one size."""

    path: BenchPath
    nbytes: int
    seconds: float
    gpu_mib: int | None

    def run(
        self,
        requests: DeviceRequests,
        server: OwnServer,
        watch: PcieMeter | None,
        idle: PcieRate | None,
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
        seen = None if watch is None or idle is None else watch.rate(began, ended)
        p50, p99 = (float(value) for value in np.percentile(samples, [50, 99]) * 1e6)
        # Whether the bytes that were copied are the right ones, once more.
        requests.check(model, way, self.nbytes)
        return Point(
            self.path,
            self.nbytes,
            len(samples),
            ended - began,
            p50,
            p99,
            {kind: after[kind] - before[kind] for kind in after},
            None if seen is None or idle is None else seen.above(idle),
            self.gpu_mib,
        )

    def _enough(self, sent: int, began: float, watch: PcieMeter | None) -> bool:
        passed = time.monotonic() - began
        if passed < self.seconds or sent < _LEAST_REQUESTS:
            return False
        if watch is None or passed > self.seconds + _PATIENCE:
            return True
        return watch.has(_SAMPLES, began)
