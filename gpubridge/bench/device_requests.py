"""Requests whose tensors are on a GPU, or go there: made once, sent again and again."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable

from gpubridge.bench.client_memory import ClientMemory
from gpubridge.bench.paths import Way
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["DeviceRequests"]

_NAMES = ("gpubridge_bench_in", "gpubridge_bench_out")
_TIMEOUT = 60


class DeviceRequests:
    """A connection to a server that has a client's regions registered.

    Parameters
    ----------
    name : str
        The server's, for messages.
    port : int
        Of its HTTP door on loopback.
    memory : ClientMemory
        The regions; outlives this object.

    Raises
    ------
    BridgeError
        The server does not take the regions.
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

    def close(self) -> None:
        """Unregister the regions and close the connection."""
        try:
            self.post("/v2/cudasharedmemory/unregister", b"", {})
        finally:
            self._connection.close()

    def check(self, model: str, way: Way, nbytes: int, *, answered: bool = True) -> None:
        """Send new random data; what comes back has to be the same.

        Parameters
        ----------
        answered : bool
            Whether the model writes its output at all.

        Raises
        ------
        BridgeError
            The request failed, or the answer is not what was sent.
        """
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
        """Return what sends one and the same request each time it is called."""
        request = _request(model, nbytes, bytes(nbytes) if way is Way.NETWORK else b"")
        return lambda: self.post(*request)

    def infer(self, model: str, nbytes: int, data: bytes = b"") -> bytes:
        """Send one request: with ``data`` in its body, or with both tensors in the regions.

        Returns
        -------
        bytes
            The whole body of the answer; an output that is not in a region is its end.
        """
        return self.post(*_request(model, nbytes, data))

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Send any POST; anything but 200 is an error."""
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise BridgeError(
                f"{self._name}: {path}: {response.status} {answer[:500]!r}", ErrorCode.INTERNAL
            )
        return answer


def _request(model: str, nbytes: int, data: bytes) -> tuple[str, bytes, dict[str, str]]:
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
    return f"/v2/models/{model}/infer", header + data, headers
