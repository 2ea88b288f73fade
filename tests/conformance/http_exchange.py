"""One raw HTTP/1.1 exchange over a plain socket: bytes out, parsed responses in.

No HTTP library stands between the case and the server, because the cases send what libraries refuse to
send and compare what libraries hide (order and spelling of headers, bytes after the response, who closes).
"""

import gzip
import re
import socket
import time
import zlib
from dataclasses import dataclass, field

READ_TIMEOUT = 4.0  # the slowest answer of the peer (a dead stub) takes about one second
LINGER = 0.25  # how long to watch whether the server closes after its last response


@dataclass
class Response:
    """One parsed response: status, reason, headers in the order sent, and the body as sent."""

    status: int
    reason: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    version: str = "HTTP/1.1"

    def header(self, name: str) -> str | None:
        """Value of the first header of that name (any case), or None."""
        return next((v for k, v in self.headers if k.lower() == name.lower()), None)

    def plain_body(self) -> bytes:
        """Body with its Content-Encoding undone."""
        coding = (self.header("Content-Encoding") or "").lower()
        if coding == "gzip":
            return gzip.decompress(self.body)
        if coding == "deflate":
            return zlib.decompress(self.body)
        return self.body


@dataclass
class Exchange:
    """Responses of an exchange, and the state of the connection afterwards.

    ``connection`` is ``open``, ``closed``, ``reset`` or ``silent`` (no whole response within the limit).
    """

    responses: list[Response]
    connection: str
    junk: bytes = b""


class _Reader:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def fill(self) -> None:
        chunk = self.sock.recv(1 << 16)
        if not chunk:
            raise EOFError
        self.buffer += chunk

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self.fill()
        head, _, self.buffer = self.buffer.partition(mark)
        return head

    def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            self.fill()
        head, self.buffer = self.buffer[:count], self.buffer[count:]
        return head

    def rest(self) -> bytes:
        try:
            while True:
                self.fill()
        except EOFError:
            head, self.buffer = self.buffer, b""
            return head


def _read_chunked(reader: _Reader) -> bytes:
    body = b""
    while True:
        size = int(reader.until(b"\r\n").split(b";")[0], 16)
        body += reader.exactly(size)
        reader.until(b"\r\n")
        if size == 0:
            return body


def _read_response(reader: _Reader, method: str) -> Response:
    lines = reader.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
    match = re.fullmatch(r"(HTTP/\d\.\d) (\d{3})(?: (.*))?", lines[0])
    if match is None:
        raise ValueError(f"not a status line: {lines[0]!r}")
    headers = [(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines[1:])]
    response = Response(int(match[2]), match[3] or "", headers, version=match[1])
    length = response.header("Content-Length")
    if response.status < 200 or response.status in (204, 304) or method == "HEAD":
        return response
    if (response.header("Transfer-Encoding") or "").lower() == "chunked":
        response.body = _read_chunked(reader)
    elif length is not None:
        response.body = reader.exactly(int(length))
    else:
        response.body = reader.rest()
    return response


def _watch_end(sock: socket.socket, reader: _Reader) -> str:
    sock.settimeout(LINGER)
    try:
        while True:
            reader.fill()
    except EOFError:
        return "closed"
    except TimeoutError:
        return "open"
    except ConnectionError:
        return "reset"


def exchange(
    address: tuple[str, int],
    parts: list[bytes],
    *,
    expected: int = 1,
    half_close: bool = False,
    method: str = "GET",
    watch_end: bool = False,
    read_timeout: float = READ_TIMEOUT,
) -> Exchange:
    """Send ``parts`` (50 ms apart), read up to ``expected`` final responses.

    Parameters
    ----------
    address
        Host and port of the server.
    parts
        Byte strings to send as they are; a pause between them lets each arrive on its own.
    expected
        Number of responses to wait for; informational (1xx) responses are kept but not counted.
    half_close
        Shut down the sending side after the last part, as a client does that gives up half-way.
    method
        Request method (a HEAD response has no body).
    watch_end
        Whether to look, after the last response, if the server closes the connection.
    read_timeout
        Seconds without a byte after which the server counts as silent.
    """
    with socket.create_connection(address, timeout=read_timeout) as sock:
        reader = _Reader(sock)
        responses: list[Response] = []
        connection = "open"
        try:
            for number, part in enumerate(parts):
                if number:
                    time.sleep(0.05)
                sock.sendall(part)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except ConnectionError:
            connection = "reset"  # the answer may have come before the server closed
        try:
            while sum(r.status >= 200 for r in responses) < expected:
                responses.append(_read_response(reader, method))
            if watch_end:
                connection = _watch_end(sock, reader)
        except EOFError:
            connection = "closed"
        except TimeoutError:
            connection = "silent"
        except ConnectionError:
            connection = "reset"
        return Exchange(responses, connection, reader.buffer)
