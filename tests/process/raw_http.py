"""HTTP by hand: requests that no client library would send, and connections that misbehave."""

import http.client
import json
import socket
from contextlib import contextmanager
from pathlib import Path

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ESTABLISHED = "01"


@contextmanager
def connected(url: str, receive_bytes: int | None = None):
    """Give a connected socket; ``receive_bytes`` makes its receive buffer small."""
    host, _, port = url.rpartition(":")
    with socket.socket() as sock:
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(150)
        sock.connect((host, int(port)))
        yield sock


def is_held(sock: socket.socket) -> bool:
    """Return whether the other end of a connection on this machine is open in the kernel."""
    mine = f":{sock.getsockname()[1]:04X}"
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(row[2].endswith(mine) and row[3] == _ESTABLISHED for row in rows)


def inference(model: str, body: bytes, *fields: str, length: int | None = None) -> bytes:
    """Return the bytes of an inference request; ``length`` is what Content-Length says."""
    length = len(body) if length is None else length
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, *fields, "", ""]).encode() + body


def binary_request(inputs, **members) -> tuple[str, bytes]:
    """Return the header-length field and the body of a request with binary inputs.

    ``inputs`` are (name, datatype, shape, bytes); every output comes back binary.
    """
    given = [
        {"name": n, "datatype": dt, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for n, dt, shape, data in inputs
    ]
    header = {"inputs": given, "parameters": {"binary_data_output": True}, **members}
    raw = json.dumps(header).encode()
    body = raw + b"".join(bytes(data) for *_, data in inputs)
    return f"Inference-Header-Content-Length: {len(raw)}", body


def read_head(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read one head; returns status, header, and what came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65_536)
        if not piece:
            raise EOFError(f"the server closed after {data!r}")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), rest


def read_answer(sock: socket.socket, *, more: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Read one whole answer; returns status, header, body. ``more`` may follow, which is dropped."""
    status, fields, rest = read_head(sock)
    body = bytearray(rest)
    length = int(fields["Content-Length"])
    while len(body) < length:
        piece = sock.recv(1 << 20)
        if not piece:
            raise EOFError(f"the server closed after {len(body)} of {length} bytes")
        body += piece
    assert more or len(body) == length, "more came than one answer"
    return status, fields, bytes(body[:length])


def read_answers(sock: socket.socket, count: int):
    """Yield the status and the body of so many answers, which come one behind the other."""
    with sock.makefile("rb") as received:
        for _ in range(count):
            status = int(received.readline().split()[1])
            fields = http.client.parse_headers(received)
            yield status, received.read(int(fields["Content-Length"]))
