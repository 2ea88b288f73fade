"""A case of the HTTP probe, and the small builders of its tables."""

import json
import struct
from dataclasses import dataclass, replace
from typing import Any

from tests.conformance.deliberate import Difference

Headers = tuple[tuple[str, str], ...]
Json = dict[str, Any]

FIRM = ("status", "headers", "body")


@dataclass(frozen=True)
class Case:
    """One HTTP exchange as data.

    Parameters
    ----------
    name
        Unique; the key of the case in the recorded answers.
    method, path, headers, body
        The request. ``Content-Length`` is added unless the headers already say how the body is framed.
    version
        The protocol named in the request line.
    raw
        Bytes to send in place of all of the above, piece by piece, for what is not valid HTTP.
    compare
        What has to be equal on two servers: ``status``, ``headers``, ``body`` and ``connection``.
    responses
        How many responses to wait for.
    half_close
        Shut the sending side down after the request.
    patience
        Seconds without a byte after which the server counts as silent.
    differs
        Why another server need not answer like the peer; None where it should.
    """

    name: str
    method: str = "GET"
    path: str = "/v2"
    headers: Headers = ()
    body: bytes = b""
    version: str = "HTTP/1.1"
    raw: tuple[bytes, ...] = ()
    compare: tuple[str, ...] = FIRM
    responses: int = 1
    half_close: bool = False
    patience: float = 4.0
    differs: Difference | None = None

    def parts(self) -> list[bytes]:
        """Pieces to send, in order."""
        return list(self.raw) or [self.head() + self.body]

    def head(self) -> bytes:
        """Request line and headers, up to and with the empty line."""
        named = {key.lower() for key, _ in self.headers}
        lines = [f"{self.method} {self.path} {self.version}"]
        if "host" not in named:
            lines.append("Host: localhost")
        lines += [f"{key}: {value}" for key, value in self.headers]
        framed = named & {"content-length", "transfer-encoding"}
        if not framed and (self.body or self.method != "GET"):
            lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def encode(document: object) -> bytes:
    """JSON bytes of ``document``; bytes and text pass as they are, so that bad JSON can be written."""
    if isinstance(document, bytes):
        return document
    if isinstance(document, str):
        return document.encode()
    return json.dumps(document).encode()


def tensor(name: str, datatype: str, shape: object, data: object) -> Json:
    """An input that carries its data as JSON."""
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def binary(name: str, datatype: str, shape: list[int], size: object) -> Json:
    """An input whose ``size`` bytes follow the JSON header."""
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": parameters}


def strings(*values: bytes) -> bytes:
    """The BYTES encoding: each value after its length as a little-endian u32."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def infer(
    name: str,
    model: str,
    document: object,
    *,
    tail: bytes | None = None,
    header_length: str | None = None,
    headers: Headers = (),
    **fields: Any,
) -> Case:
    """A POST to ``/v2/models/{model}/infer``; ``tail`` or ``header_length`` makes it binary."""
    header = encode(document)
    if header_length is None and tail is not None:
        header_length = str(len(header))
    if header_length is not None:
        headers += (("Inference-Header-Content-Length", header_length),)
    path = f"/v2/models/{model}/infer"
    return Case(name, "POST", path, headers, header + (tail or b""), **fields)


def sent(name: str, model: str, *tensors: Json, **fields: Any) -> Case:
    """The same with these inputs, and nothing else in the document."""
    return infer(name, model, {"inputs": list(tensors)}, **fields)


def get(name: str, path: str, **fields: Any) -> Case:
    """A GET without a body."""
    return Case(name, "GET", path, **fields)


def post(name: str, path: str, body: bytes = b"", **fields: Any) -> Case:
    """A POST to a path that is no infer path."""
    return Case(name, "POST", path, body=body, **fields)


def with_connection(case: Case) -> Case:
    """The same case, also comparing whether the server closes afterwards."""
    return replace(case, compare=(*case.compare, "connection"))


INPUT0 = tensor("INPUT0", "FP32", [4], [1, 2, 3, 4])
INPUT1 = tensor("INPUT1", "FP32", [4], [1, 1, 1, 1])
ADD_SUB = encode({"inputs": [INPUT0, INPUT1]})
