"""The requests that the load rows send, with the exact answer that each must bring."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.schema import message_class

STRING_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it stands on the wire: little-endian bytes in C order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Payload:
    """One binary-extension infer request and its expected outputs.

    The first ``batch_dims`` dims of its tensors are not in the model's configuration. A decoupled
    model sends ``responses`` of them to each request, the first with the expected outputs; 0 stands
    for one answer of a model that is not decoupled.
    """

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batch_dims: int = 0
    responses: int = 0

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/infer"

    def header(self) -> bytes:
        """Return the JSON part of the request body; the inputs' bytes follow it."""
        inputs = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in self.inputs
        ]
        outputs = [
            {"name": tensor.name, "parameters": {"binary_data": True}} for tensor in self.outputs
        ]
        document = {"inputs": inputs, "outputs": outputs}
        return json.dumps(document, separators=(",", ":")).encode()

    def body(self) -> bytes:
        """Return the whole request body."""
        return self.header() + b"".join(tensor.data for tensor in self.inputs)

    def message(self) -> bytes:
        """Return the same request as a ModelInferRequest."""
        request = message_class("ModelInferRequest")(model_name=self.model)
        for tensor in self.inputs:
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            request.raw_input_contents.append(tensor.data)
        return bytes(request.SerializeToString())


def add_sub(model: str = "add_sub", batch: tuple[int, ...] = ()) -> Payload:
    """Return a request for the sum and difference of two FP32[16], with batch dims before them."""
    left = np.arange(16, dtype=np.float32)
    right = np.full(16, 0.5, dtype=np.float32)
    values = {"INPUT0": left, "INPUT1": right, "OUTPUT0": left + right, "OUTPUT1": left - right}
    tensors = {
        name: Tensor(name, "FP32", (*batch, *array.shape), array.tobytes())
        for name, array in values.items()
    }
    return Payload(
        model,
        inputs=(tensors["INPUT0"], tensors["INPUT1"]),
        outputs=(tensors["OUTPUT0"], tensors["OUTPUT1"]),
        batch_dims=len(batch),
    )


def fp32(nbytes: int) -> Payload:
    """Return an identity request of ``nbytes`` (a multiple of 4) bytes of FP32."""
    array = np.arange(nbytes // 4, dtype=np.float32)
    return _identity("identity_fp32", "FP32", array.shape, array.tobytes())


def strings(count: int = STRING_COUNT) -> Payload:
    """Return an identity request of ``count`` short strings, one in ten of them not ASCII."""
    texts = (
        f"träger-{index}" if index % 10 == 0 else f"token-{index * 7919 % 100_003}-{index}"
        for index in range(count)
    )
    encoded = [text.encode() for text in texts]
    data = b"".join(struct.pack("<I", len(item)) + item for item in encoded)
    return _identity("identity_bytes", "BYTES", (count,), data)


def stream() -> Payload:
    """Return a request that is answered by a hundred responses: an INT32 that counts up."""
    first = Tensor("INPUT0", "INT32", (1,), struct.pack("<i", 7))
    return Payload("stream_100", (first,), (replace(first, name="OUTPUT0"),), responses=100)


def _identity(model: str, datatype: str, shape: tuple[int, ...], data: bytes) -> Payload:
    return Payload(
        model,
        inputs=(Tensor("INPUT0", datatype, shape, data),),
        outputs=(Tensor("OUTPUT0", datatype, shape, data),),
    )


PAYLOADS: Mapping[str, Callable[[], Payload]] = {
    "add_sub": add_sub,
    "add_sub_batched": lambda: add_sub("add_sub_batched", (1,)),
    "bls_add_sub": lambda: add_sub("bls_add_sub"),
    "bls_64_add_sub": lambda: add_sub("bls_64_add_sub"),
    "stream_100": stream,
    "fp32_600k": lambda: fp32(600_000),
    "fp32_16m": lambda: fp32(16 * 2**20),
    "bytes_10k": strings,
}


def check_answer(payload: Payload, port: int, server: str) -> None:
    """Send ``payload`` once to 127.0.0.1:``port`` and compare every output byte.

    Raises
    ------
    BridgeError
        If the status, an output's metadata or any of its bytes is not the expected one.
    """
    if payload.responses:
        _check_stream(payload, port, server)
        return
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Inference-Header-Content-Length": str(len(payload.header()))}
    try:
        connection.request("POST", payload.path, payload.body(), headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise BridgeError(f"{server}: no answer to POST {payload.path}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        text = body[:300].decode(errors="replace")
        raise BridgeError(
            f"{server}: POST {payload.path}: expected status 200, got {response.status}: {text}"
        )
    length = response.headers.get("Inference-Header-Content-Length", "")
    if not length.isdigit():
        raise BridgeError(
            f"{server}: POST {payload.path}: expected a binary answer with "
            f"Inference-Header-Content-Length, got {length!r}"
        )
    _compare(payload, body, int(length), f"{server}: model {payload.model}")


def _check_stream(payload: Payload, port: int, server: str) -> None:
    """Ask a decoupled model over HTTP, and count its responses."""
    path = f"/v2/models/{payload.model}/generate_stream"
    (given,) = payload.inputs
    (first,) = struct.unpack("<i", given.data)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps({given.name: first}))
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise BridgeError(f"{server}: no answer to POST {path}: {error!r}") from error
    finally:
        connection.close()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    try:
        got = [json.loads(event)[payload.outputs[0].name] for event in events]
    except (ValueError, KeyError):
        got = []
    if got != list(range(first, first + payload.responses)):
        raise BridgeError(
            f"{server}: POST {path}: expected {payload.responses} numbers, got {text[:300]}"
        )


def _compare(payload: Payload, body: bytes, header_length: int, where: str) -> None:
    document = json.loads(body[:header_length])
    answered: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    offset = header_length
    for output in document["outputs"]:
        size = output["parameters"]["binary_data_size"]
        data = body[offset : offset + size]
        answered[output["name"]] = (output["datatype"], tuple(output["shape"]), data)
        offset += size
    for tensor in payload.outputs:
        expected = (tensor.datatype, tensor.shape, tensor.data)
        if answered.get(tensor.name) != expected:
            got = answered.get(tensor.name)
            seen = f"{got[0]} {list(got[1])}, {len(got[2])} bytes" if got else "nothing"
            raise BridgeError(
                f"{where}: output {tensor.name}: expected {tensor.datatype} {list(tensor.shape)} "
                f"of {len(tensor.data)} given bytes, got {seen} or other contents"
            )
