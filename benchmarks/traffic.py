"""Requests of which no two have the same bytes, as the load client takes them."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpubridge.schema import message_class

__all__ = [
    "CONNECTION",
    "SEQUENCE",
    "TURN",
    "Request",
    "Traffic",
    "binary_request",
    "grpc_request",
    "json_request",
    "raw_request",
    "shared_request",
    "write_traffic",
]

#: Stands in a text where the client writes the number of the request.
TURN = "@" * 10
#: Stands where it writes the number of the sequence (the pass over all requests).
SEQUENCE = "#" * 10
#: Stands where it writes the number of its connection, from 0.
CONNECTION = "~" * 4

_MARKS = re.compile(rb"@{4,}|#{4,}|~{4}")


class Fill(IntEnum):
    """The values that the client writes."""

    DECIMAL = 0
    FLOAT = 1
    SEQUENCE = 2
    CONNECTION = 3
    # A float, too, but in the connection's region of shared memory instead of the request.
    SHARED = 4


_KINDS = {b"@": Fill.DECIMAL, b"#": Fill.SEQUENCE, b"~": Fill.CONNECTION}


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes of a request, and the places that the client writes to: offset, width, value."""

    data: bytes
    slots: tuple[tuple[int, int, Fill], ...] = ()

    def filled(self, turn: int = 1) -> bytes:
        """Return the request as the client would send it."""
        data = bytearray(self.data)
        for offset, width, fill in self.slots:
            if fill is Fill.FLOAT:
                data[offset : offset + width] = struct.pack("<f", 1.0 + turn / 8)
            elif fill is Fill.CONNECTION:
                data[offset : offset + width] = b"0" * width
            elif fill is not Fill.SHARED:
                data[offset : offset + width] = b"9%0*d" % (width - 1, turn)
        return bytes(data)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that the client sends to a server, over and over.

    ``path`` is the gRPC method, "" for HTTP. With ``in_order`` each connection sends all requests from
    the first to the last, else they are sent in one turn by all. ``models`` are those whose statistics
    count the requests; each request brings ``responses``. ``regions`` begins the names of the files in
    /dev/shm that a slot `Fill.SHARED` is written to: the number of the connection ends them.
    """

    requests: Sequence[Request]
    models: tuple[str, ...]
    path: str = ""
    in_order: bool = False
    responses: int = 1
    regions: str = ""

    @property
    def protocol(self) -> str:
        """The protocol, as the client names it."""
        return "grpc" if self.path else "http"


def binary_request(
    model: str,
    inputs: Mapping[str, NDArray[np.float32] | bytes],
    outputs: Sequence[str],
    *,
    request_id: str | None = None,
    parameters: str = "",
    vary_values: bool = True,
) -> Request:
    """Return an infer request over HTTP with binary tensors.

    An input is an array, or the one string of a BYTES tensor. The first float of the first input
    varies with ``vary_values``; marks may stand in strings and in ``parameters``, which are JSON.
    """
    described, contents = [], []
    for name, given in inputs.items():
        datatype, shape, data = _tensor(given)
        contents.append(data)
        described.append(
            f'{{"name":"{name}","datatype":"{datatype}","shape":{json.dumps(shape)},'
            f'"parameters":{{"binary_data_size":{len(data)}}}}}'
        )
    wanted = ",".join(
        f'{{"name":"{name}","parameters":{{"binary_data":true}}}}' for name in outputs
    )
    opening = "" if request_id is None else f'"id":"{request_id}",'
    opening += f'"parameters":{parameters},' if parameters else ""
    header = f'{{{opening}"inputs":[{",".join(described)}],"outputs":[{wanted}]}}'.encode()
    head = _head(f"/v2/models/{model}/infer", len(header) + sum(map(len, contents)), len(header))
    slots = _marked(header, len(head))
    begin = len(head) + len(header)
    for index, (given, data) in enumerate(zip(inputs.values(), contents, strict=True)):
        if isinstance(given, bytes):
            slots += _marked(data, begin)
        elif vary_values and index == 0:
            slots.append((begin, 4, Fill.FLOAT))
        begin += len(data)
    return Request(head + header + b"".join(contents), tuple(slots))


def json_request(path: str, document: str) -> Request:
    """Return a request over HTTP whose body is JSON, in which marks may stand for digits."""
    return raw_request(path, "application/json", document.encode())


def raw_request(path: str, kind: str, body: bytes) -> Request:
    """Return a request over HTTP of a content type, in whose body marks may stand for digits."""
    head = _head(path, len(body), None, kind)
    return Request(head + body, tuple(_marked(body, len(head))))


def shared_request(model: str, given: str, answered: str, regions: tuple[str, str]) -> Request:
    """Return a request over HTTP for a connection whose tensors lie in regions of shared memory.

    ``given`` and ``answered`` describe the input and the output: members of JSON without parameters. The
    regions' names end in the number of the connection; the input's first float varies.
    """
    size = ',"parameters":{"shared_memory_region":"%s","shared_memory_byte_size":%d}}'
    nbytes = 4 * math.prod(json.loads(given)["shape"])
    described = [
        text[:-1] + size % (region + CONNECTION, nbytes)
        for text, region in zip((given, answered), regions, strict=True)
    ]
    document = f'{{"id":"{TURN}","inputs":[{described[0]}],"outputs":[{described[1]}]}}'
    request = json_request(f"/v2/models/{model}/infer", document)
    return Request(request.data, (*request.slots, (0, 4, Fill.SHARED)))


def grpc_request(
    model: str, inputs: Mapping[str, NDArray[np.float32] | bytes], *, request_id: str = ""
) -> Request:
    """Return a ModelInferRequest; its first float varies, and marks in its strings do."""
    message = message_class("ModelInferRequest")(model_name=model, id=request_id)
    for name, given in inputs.items():
        datatype, shape, data = _tensor(given)
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    data = bytes(message.SerializeToString())
    slots = _marked(data, 0)
    first = next(iter(inputs.values()))
    if not isinstance(first, bytes):
        slots.append((data.index(first.tobytes()), 4, Fill.FLOAT))
    return Request(data, tuple(slots))


def write_traffic(traffic: Traffic, path: Path) -> None:
    """Write requests as the client reads them."""
    regions = traffic.regions.encode()
    parts = [struct.pack("<I", len(regions)), regions]
    parts.append(struct.pack("<II", traffic.in_order, len(traffic.requests)))
    for request in traffic.requests:
        parts.append(struct.pack("<I", len(request.slots)))
        parts += [struct.pack("<III", *slot) for slot in request.slots]
        parts += [struct.pack("<I", len(request.data)), request.data]
    path.write_bytes(b"".join(parts))


def _tensor(given: NDArray[np.float32] | bytes) -> tuple[str, list[int], bytes]:
    if isinstance(given, bytes):
        return "BYTES", [1], struct.pack("<I", len(given)) + given
    return "FP32", list(given.shape), given.tobytes()


def _head(
    path: str, length: int, header_length: int | None, kind: str = "application/octet-stream"
) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {kind}"]
    lines.append(f"Content-Length: {length}")
    if header_length is not None:
        lines.append(f"Inference-Header-Content-Length: {header_length}")
    return "\r\n".join([*lines, "", ""]).encode()


def _marked(data: bytes, start: int) -> list[tuple[int, int, Fill]]:
    """Return the slots at the marks in a text that begins at ``start`` of the request."""
    return [
        (start + mark.start(), len(mark[0]), _KINDS[mark[0][:1]]) for mark in _MARKS.finditer(data)
    ]
