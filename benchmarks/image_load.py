"""Loads a server with photographs: raw sockets, one thread each, requests made before."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.image_models import MODEL
from benchmarks.proc import cpu_seconds
from benchmarks.server_process import ServerProcess
from gpubridge.errors import BridgeError

__all__ = ["IMAGE_BYTES", "Figures", "ImageRequests", "ask", "ask_into", "register_region"]

_PATH = f"/v2/models/{MODEL}/infer"
IMAGE_BYTES = 3 * 224 * 224 * 4
"""Of the pixels of an image."""
_HEAD_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round.

    Attributes
    ----------
    images : float
        Per second.
    p50, p99 : float
        Microseconds of a request.
    cpu : float
        Microseconds of an image that the server's processes spent on processors.
    """

    images: float
    p50: float
    p99: float
    cpu: float

    def as_document(self) -> dict[str, float]:
        """Return the figures as written to JSON."""
        return {
            "images_per_second": self.images,
            "p50_us": self.p50,
            "p99_us": self.p99,
            "server_cpu_us_per_image": self.cpu,
        }


@dataclass(frozen=True, slots=True)
class ImageRequests:
    """Requests of one batch size: each begins at another photograph, and goes round."""

    batch: int
    bodies: Sequence[bytes]

    @classmethod
    def of(cls, jpegs: Sequence[bytes], batch: int, region: str | None = None) -> ImageRequests:
        """Make as many different requests as there are photographs.

        Parameters
        ----------
        region : str, optional
            A registered region for the pixels, in which later answers replace earlier ones.
        """
        bodies = []
        for first in range(len(jpegs)):
            files = itertools.islice(itertools.cycle(jpegs), first, first + batch)
            header, data = _parts(list(files), region)
            head = (
                f"POST {_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Length: {len(header) + len(data)}\r\n"
                f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
            )
            bodies.append(head.encode() + header + data)
        return cls(batch, bodies)

    def load(self, server: ServerProcess, connections: int, seconds: float) -> Figures:
        """Send requests for so long, one at a time on each connection, and one at least.

        Raises
        ------
        BridgeError
            A request failed.
        """
        port, spent = server.http_port, cpu_seconds(server.pid)
        latencies: list[float] = []
        failures: list[str] = []
        began = time.perf_counter()

        def work(first: int) -> None:
            buffer = bytearray(IMAGE_BYTES * self.batch + _HEAD_LIMIT)
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for turn in itertools.count(first):
                        start = time.perf_counter()
                        connection.sendall(self.bodies[turn % len(self.bodies)])
                        _receive(connection, memoryview(buffer))
                        ended = time.perf_counter()
                        latencies.append(ended - start)
                        if ended - began > seconds:
                            return
            except (OSError, BridgeError) as error:
                failures.append(str(error))

        threads = [
            threading.Thread(target=work, args=(number,), daemon=True)
            for number in range(connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        passed = time.perf_counter() - began
        if failures or not latencies:
            raise BridgeError(f"{len(failures)} connections failed: {failures[:1]}")
        p50, p99 = (float(value) for value in np.percentile(latencies, [50, 99]) * 1e6)
        images = len(latencies) * self.batch
        cpu = (cpu_seconds(server.pid) - spent) / images * 1e6
        return Figures(images / passed, p50, p99, cpu)


def ask(port: int, jpegs: Sequence[bytes]) -> NDArray[np.float32]:
    """Return the pixels of files in one request: ``[images, 3, 224, 224]``."""
    answer = _answer(port, *_parts(jpegs, None))
    return np.frombuffer(answer[-IMAGE_BYTES * len(jpegs) :], np.float32).reshape(-1, 3, 224, 224)


def ask_into(port: int, jpegs: Sequence[bytes], region: str) -> None:
    """Have the pixels of files written into a registered region."""
    _answer(port, *_parts(jpegs, region))


def register_region(port: int, kind: str, name: str, description: dict[str, object]) -> None:
    """Register memory of this process with a server.

    Parameters
    ----------
    kind : str
        "system" or "cuda".
    description : dict
        The body of the request, as the protocol has it.
    """
    path = f"/v2/{kind}sharedmemory/region/{name}/register"
    _post(port, path, json.dumps(description).encode(), {})


def _answer(port: int, header: bytes, data: bytes) -> bytes:
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return _post(port, _PATH, header + data, headers)


def _post(port: int, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise BridgeError(f"{path}: {response.status} {answer[:300]!r}")
    return answer


def _parts(jpegs: Sequence[bytes], region: str | None) -> tuple[bytes, bytes]:
    """Return the JSON and the bytes of a request."""
    data = b"".join(struct.pack("<I", len(jpeg)) + jpeg for jpeg in jpegs)
    given = {
        "name": "IMAGE",
        "datatype": "BYTES",
        "shape": [len(jpegs), 1],
        "parameters": {"binary_data_size": len(data)},
    }
    place: dict[str, object] = {"binary_data": True}
    if region is not None:
        nbytes = IMAGE_BYTES * len(jpegs)
        place = {"shared_memory_region": region, "shared_memory_byte_size": nbytes}
    wanted = {"name": "PIXELS", "parameters": place}
    return json.dumps({"inputs": [given], "outputs": [wanted]}).encode(), data


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    """Read one whole answer, which states its length."""
    filled = 0
    while (end := bytes(buffer[: min(filled, _HEAD_LIMIT)]).find(b"\r\n\r\n")) < 0:
        filled += _some(connection, buffer[filled:])
    status, *lines = bytes(buffer[:end]).decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    whole = end + 4 + int(fields["content-length"])
    while filled < whole:
        filled += _some(connection, buffer[filled:whole])
    if status.split()[1] != "200":
        raise BridgeError(bytes(buffer[end + 4 : whole])[:300].decode(errors="replace"))


def _some(connection: socket.socket, buffer: memoryview) -> int:
    count = connection.recv_into(buffer)
    if not count:
        message = "the server closed the connection within an answer"
        raise ConnectionError(message)
    return count
