"""Requests whose tensors are on a GPU, or go there: made once, sent again and again."""

from __future__ import annotations

import base64
import http.client
import json
import statistics
import time

import numpy as np

from benchmarks.failure import BenchmarkError
from benchmarks.gpu_memory import ClientMemory
from benchmarks.gpu_rows import GpuRow, Way

__all__ = ["Requests"]

_NAMES = ("gpubridge_bench_in", "gpubridge_bench_out")
_LEAST = 5
_TIMEOUT = 60


class Requests:
    """A connection to one server, which has the benchmark's regions registered.

    Parameters
    ----------
    name : str
        The server's, for messages.
    memory : ClientMemory
        The regions; outlives this object.
    """

    def __init__(self, name: str, port: int, memory: ClientMemory) -> None:
        self._name = name
        self._memory = memory
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        for region, segment in zip(_NAMES, (memory.source, memory.target), strict=True):
            handle = base64.b64encode(segment.handle).decode()
            body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": memory.nbytes}
            path = f"/v2/cudasharedmemory/region/{region}/register"
            self._post(path, json.dumps(body).encode(), {})

    def close(self) -> None:
        """Unregister the regions and close the connection."""
        self._post("/v2/cudasharedmemory/unregister", b"", {})
        self._connection.close()

    def check(self, row: GpuRow, nbytes: int) -> None:
        """Send a request with new random data into poisoned memory.

        Raises
        ------
        BenchmarkError
            The answer is not the input.
        """
        sent = self._memory.prepare(nbytes)
        if row.way is Way.NETWORK:
            answer = self._post(*_infer(row, nbytes, sent))
            got = answer[len(answer) - nbytes :]
        elif row.way is Way.REGIONS:
            self._post(*_infer(row, nbytes, b""))
            got = self._memory.received(nbytes)
        else:
            answer = self._post(*_infer(row, 4, bytes(4)))
            sent, got = np.float32(48).tobytes(), answer[-4:]
        if row.checked and got != sent:
            message = f"{self._name}: {row.model}: an answer of {nbytes} bytes is not what was sent"
            raise BenchmarkError(message)

    def time(self, row: GpuRow, nbytes: int, seconds: float) -> float:
        """Return the median of microseconds of a request, one after the other."""
        small = row.way is Way.WITHIN
        data = bytes(4 if small else nbytes) if row.way is not Way.REGIONS else b""
        request = _infer(row, 4 if small else nbytes, data)
        samples: list[float] = []
        began = time.perf_counter()
        while len(samples) < _LEAST or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            self._post(*request)
            samples.append(time.perf_counter() - start)
        return statistics.median(samples) * 1e6

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            message = f"{self._name}: {path}: {response.status} {answer[:500]!r}"
            raise BenchmarkError(message)
        return answer


def _infer(row: GpuRow, nbytes: int, data: bytes) -> tuple[str, bytes, dict[str, str]]:
    """Return path, body and headers of a request; with data in the body, or in the regions."""
    given: dict[str, object] = {"name": "INPUT0", "datatype": "FP32", "shape": [nbytes // 4]}
    wanted: dict[str, object] = {"name": "OUTPUT0"}
    if data:
        given["parameters"] = {"binary_data_size": len(data)}
        wanted["parameters"] = {"binary_data": True}
    else:
        given["parameters"], wanted["parameters"] = (
            {"shared_memory_region": name, "shared_memory_byte_size": nbytes} for name in _NAMES
        )
    header = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return f"/v2/models/{row.model}/infer", header + data, headers
