"""Requests whose tensors are on a GPU or go there: made once, sent repeatedly."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from gpubridge.cuda_ipc import CopyStream, DeviceContext, DeviceInfo, DeviceSegment
from gpubridge.errors import BridgeError, ErrorCode

if TYPE_CHECKING:
    from typing_extensions import Self

_POISON = 0xA5
_NAMES = ("gpubridge_bench_in", "gpubridge_bench_out")
_TIMEOUT = 60


class Way(str, Enum):
    """Location of a request's input and output tensors at the client."""

    REGIONS = "CUDA shared memory"
    NETWORK = "HTTP"


@dataclass(frozen=True, slots=True)
class BenchPath:
    """A path through a ``model`` of this package, and how often the bridge may copy on the device."""

    name: str
    title: str
    model: str
    way: Way
    copies: int

    @property
    def stays(self) -> bool:
        """Return whether the tensor can stay on the device."""
        return self.way is Way.REGIONS


PATHS = (
    BenchPath("hand_on", "device: the model's own tensor", "hand_on", Way.REGIONS, 1),
    BenchPath("place", "device: written by request.output", "place", Way.REGIONS, 0),
    BenchPath("chain", "device: ensemble of two models", "chain", Way.REGIONS, 2),
    BenchPath("host", "host: over HTTP, to the GPU and back", "upload", Way.NETWORK, 0),
)


class ClientMemory:
    """Two regions of one size on a device, and a stream to copy there; a context manager.

    ``source`` is for inputs, ``target`` for outputs; each has the handle that a server opens.
    """

    def __init__(self, device: DeviceInfo, nbytes: int) -> None:
        self.nbytes = nbytes
        with ExitStack() as stack:
            self.context = DeviceContext(device)
            stack.callback(self.context.close)
            self.stream = CopyStream(self.context)
            stack.callback(self.stream.close)
            self.source = DeviceSegment.allocate(self.context, 0, nbytes)
            stack.callback(self.source.close)
            self.target = DeviceSegment.allocate(self.context, 0, nbytes)
            stack.callback(self.target.close)
            self._owned = stack.pop_all()

    def __enter__(self) -> ClientMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def prepare(self, nbytes: int) -> bytes:
        """Write random bytes into the source, poison into the target; return the random bytes."""
        sent = np.random.default_rng().bytes(nbytes)
        self.stream.h2d(self.source.pointer, memoryview(sent), nbytes)
        self.stream.h2d(self.target.pointer, memoryview(bytes([_POISON]) * nbytes), nbytes)
        self.stream.wait()
        return sent

    def received(self, nbytes: int) -> bytes:
        """Return the contents of the target."""
        data = bytearray(nbytes)
        self.stream.d2h(memoryview(data), self.target.pointer, nbytes)
        self.stream.wait()
        return bytes(data)


class DeviceRequests:
    """A connection to a server with which a client's regions are registered; a context manager.

    Raises BridgeError, with ``name``, if the server refuses the regions.
    """

    def __init__(self, name: str, port: int, memory: ClientMemory) -> None:
        self._name = name
        self._memory = memory
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        for region, segment in zip(_NAMES, (memory.source, memory.target), strict=True):
            handle = base64.b64encode(segment.handle).decode()
            body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": memory.nbytes}
            path = f"/v2/cudasharedmemory/region/{region}/register"
            self.post(path, json.dumps(body).encode(), {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the connection; the regions are unregistered unless a request was interrupted."""
        try:
            if kind is None:
                self.post("/v2/cudasharedmemory/unregister", b"", {})
        finally:
            self._connection.close()

    def check(self, model: str, way: Way, nbytes: int, *, answered: bool = True) -> None:
        """Send new random data; if it is ``answered``, the answer has to be the same."""
        sent = self._memory.prepare(nbytes)
        if way is Way.NETWORK:
            answer = self.infer(model, nbytes, sent)
            got = answer[len(answer) - nbytes :]
        else:
            self.infer(model, nbytes)
            got = self._memory.received(nbytes)
        if answered and got != sent:
            raise BridgeError(
                f"{self._name}: {model}: an answer of {nbytes} bytes is not what was sent",
                ErrorCode.INTERNAL,
            )

    def prepared(self, model: str, way: Way, nbytes: int) -> Callable[[], object]:
        """Return a function that sends the same request each time it is called."""
        request = _request(model, nbytes, bytes(nbytes) if way is Way.NETWORK else b"")
        return lambda: self.post(*request)

    def infer(self, model: str, nbytes: int, data: bytes = b"") -> bytes:
        """Send one request, ``data`` in its body or both tensors in regions; return the answer."""
        return self.post(*_request(model, nbytes, data))

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Send a POST; any status but 200 is an error."""
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise BridgeError(
                f"{self._name}: {path}: {response.status} {answer[:500]!r}", ErrorCode.INTERNAL
            )
        return answer


def _request(model: str, nbytes: int, data: bytes) -> tuple[str, bytes, dict[str, str]]:
    """Return path, body and headers of a request, with data in the body or in the regions."""
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
    return f"/v2/models/{model}/infer", header + data, headers
