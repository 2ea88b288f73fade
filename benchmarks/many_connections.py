"""Many HTTP connections at once, half of them slow, and their effect on the fast half.

A slow client sends a head, or a body, a byte at a time, or asks for 6 MiB and reads them bit by bit; when
it is cut off, it comes again. A fast one sends small requests at a steady pace.
``python -m benchmarks.many_connections`` starts a server, and compares the fast half alone with the
fast half beside the slow one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.proc import Usage, usage

__all__ = ["Half", "fast_half", "slow_half", "write_models"]

_PACE_SECONDS = 0.25
_TICK_SECONDS = 1.0
_ARRIVAL_SECONDS = 5.0
_SETTLE_SECONDS = 60.0
_READ_BYTES = 1024
_SMALL_BUFFER = 4096

_MODELS = {
    "small": ("TYPE_FP32", "request.inputs()[0].as_numpy() + 1"),
    "large": ("TYPE_FP32", "np.zeros(3 << 19, np.float32)"),
}
_SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {made})]) for request in requests
        ]
"""


@dataclass
class Half:
    """Results of the clients of one kind.

    Attributes
    ----------
    latencies : list of float
        Seconds of each request that was answered with 200.
    failures : list of str
        The answers to the others.
    cut_off : int
        How often the server closed a connection.
    """

    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cut_off: int = 0

    def quantile(self, share: float) -> float:
        """Return a quantile of the latencies in milliseconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000


def write_models(repository: Path) -> None:
    """Write the two models that the clients ask: one with small answers, one with large ones."""
    for name, (datatype, made) in _MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(_SOURCE.format(made=made))
        (repository / name / "config.pbtxt").write_text(
            'backend: "python"\n'
            f'input [{{ name: "IN" data_type: {datatype} dims: [-1] }}]\n'
            f'output [{{ name: "OUT" data_type: {datatype} dims: [-1] }}]\n'
        )


def _request(model: str, elements: int, *, announced: int = 0) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [elements], "data": [1.0] * elements}
    asked = {"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}
    body = json.dumps(asked).encode()
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {announced or len(body)}\r\n\r\n"
    ).encode() + body


async def fast_half(url: str, connections: int, seconds: float) -> Half:
    """Send small requests on so many connections, each at a steady pace."""
    seen = Half()
    end = time.monotonic() + seconds
    request = _request("small", 16)
    await asyncio.gather(
        *(_send_steadily(url, request, at / connections, end, seen) for at in range(connections))
    )
    return seen


async def _send_steadily(url: str, request: bytes, phase: float, end: float, seen: Half) -> None:
    await asyncio.sleep(phase * _PACE_SECONDS)
    async with _connected(url) as sock:
        loop = asyncio.get_running_loop()
        while (begin := time.monotonic()) < end:
            await loop.sock_sendall(sock, request)
            answer = await loop.sock_recv(sock, 1 << 16)
            if not answer.startswith(b"HTTP/1.1 200"):
                seen.failures.append(answer[:100].decode("latin-1") or "closed")
                return
            seen.latencies.append(time.monotonic() - begin)
            await asyncio.sleep(max(0.0, begin + _PACE_SECONDS - time.monotonic()))


@asynccontextmanager
async def slow_half(url: str, connections: int) -> AsyncIterator[Half]:
    """Keep so many slow connections open for as long as the block runs."""
    seen = Half()
    ways = (_slow_head, _slow_body, _slow_reader)
    tasks = [
        asyncio.create_task(
            _again_and_again(ways[number % len(ways)], url, number / connections, seen)
        )
        for number in range(connections)
    ]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again_and_again(
    way: Callable[[socket.socket], Coroutine[Any, Any, None]], url: str, phase: float, seen: Half
) -> None:
    await asyncio.sleep(phase * _TICK_SECONDS)
    while True:
        with suppress(OSError):
            async with _connected(url, receive_bytes=_SMALL_BUFFER) as sock:
                await way(sock)
        seen.cut_off += 1
        await asyncio.sleep(_TICK_SECONDS)


async def _drip(sock: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    for at in range(len(data)):
        await loop.sock_sendall(sock, data[at : at + 1])
        await asyncio.sleep(_TICK_SECONDS)
        with suppress(BlockingIOError):
            sock.recv(_READ_BYTES)
            return  # refused


async def _slow_head(sock: socket.socket) -> None:
    await _drip(sock, _request("small", 16))


async def _slow_body(sock: socket.socket) -> None:
    request = _request("small", 16, announced=1 << 20)
    await asyncio.get_running_loop().sock_sendall(sock, request)
    await _drip(sock, b" " * (1 << 20))


async def _slow_reader(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _request("large", 1))
    while await loop.sock_recv(sock, _READ_BYTES):  # noqa: ASYNC110
        await asyncio.sleep(_TICK_SECONDS)


@asynccontextmanager
async def _connected(url: str, receive_bytes: int | None = None) -> AsyncIterator[socket.socket]:
    host, _, port = url.rpartition(":")
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        yield sock


async def _settled(pid: int, descriptors: int) -> Usage:
    """Return a server's resources after it has released unused ones."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    held = usage(pid)
    while held.descriptors > descriptors and time.monotonic() < deadline:
        await asyncio.sleep(1)
        held = usage(pid)
    return held


async def _compare(url: str, pid: int, connections: int, seconds: float) -> None:
    half = connections // 2
    await fast_half(url, half, 2.0)
    before = usage(pid)
    alone = await fast_half(url, half, seconds)
    async with slow_half(url, connections - half) as slow:
        # Large answers are made at once for all slow readers.
        await asyncio.sleep(_ARRIVAL_SECONDS)
        beside = await fast_half(url, half, seconds)
        during = usage(pid)
    after = await _settled(pid, before.descriptors)
    rows = [("fast half alone", alone), ("beside the slow half", beside)]
    for name, seen in rows:
        sys.stdout.write(
            f"{name:<22} {len(seen.latencies):>7} answered, {len(seen.failures)} failed; "
            f"p50 {seen.quantile(0.5):.2f} ms, p90 {seen.quantile(0.9):.2f} ms, "
            f"p99 {seen.quantile(0.99):.2f} ms\n"
        )
    sys.stdout.write(f"slow connections cut off: {slow.cut_off}\n")
    for when, held in (("before", before), ("during", during), ("after", after)):
        sys.stdout.write(f"{when:<8} PSS {held.pss_mib:.0f} MiB, {held.descriptors} descriptors\n")


def main() -> None:
    """Start a server, compare, stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder) / "models")
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "gpubridge", "serve", "--http-port=0", "--grpc-port=0"]
        command += ["--metrics-port=0", f"--model-repository={folder}/models"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while not log.read_text().rstrip().endswith("ready"):
                time.sleep(0.1)
            found = re.search(r"Started HTTPService at (\S+)", log.read_text())
            assert found is not None
            uvloop.run(_compare(found[1], process.pid, options.connections, options.seconds))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
