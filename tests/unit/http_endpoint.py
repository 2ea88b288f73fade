"""A connection without a socket: a transport and handlers that write down what happens to them."""

import socket
import zlib

from gpubridge.config import HttpConnections
from gpubridge.dataplane import HttpOrigins
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.http.connection import HttpConnection, HttpListener
from gpubridge.frontend.http.message import HttpSettings
from gpubridge.host_shm import Budget
from gpubridge.host_shm.private_memory import PrivateMemory
from gpubridge.protocol.status import error_body, http_status

__all__ = ["BODY_LIMIT", "GET", "Endpoint", "chunked", "error", "parse_answers", "post"]

BODY_LIMIT = 100_000
LIMITS = HttpConnections()
WORKERS = Workers()


GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body, target=b"/echo", *fields, version=b"1.1"):
    lines = [b"POST " + target + b" HTTP/" + version, b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join([*lines, b"", body])


def chunked(body, size, target=b"/echo", *fields, trailer=b""):
    lines = [b"POST " + target + b" HTTP/1.1", b"Transfer-Encoding: chunked", *fields]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"\r\n".join([*lines, b"", chunks]) + b"0\r\n" + trailer + b"\r\n"


def error(text):
    return b'{"error":"' + text + b'"}'


class Transport:
    """Sends into ``sent``; ``state`` is open, half (no more can be sent) or closed."""

    def __init__(self, descriptor: int = 3) -> None:
        self.sent = bytearray()
        self.writes = 0
        self.state = "open"
        self.reading = True
        self.unsent = 0
        self.descriptor = descriptor
        self.kernel = 1
        """The state of the connection in the kernel: established, until a test says otherwise."""

    def get_extra_info(self, name, _=None):
        return ("1.2.3.4", 5) if name == "peername" else self

    def fileno(self) -> int:
        return self.descriptor

    def getsockopt(self, level, option, size) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return bytes([self.kernel])

    def set_write_buffer_limits(self, high) -> None:
        """Take limits, which mean nothing here."""

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data) -> None:
        assert self.state == "open", "write on a connection that was closed"
        self.sent += data
        self.writes += 1

    def writelines(self, parts) -> None:
        for part in parts:
            self.write(part)

    def write_eof(self) -> None:
        assert self.state == "open"
        self.state = "half"

    def close(self) -> None:
        self.state = "closed"

    abort = close

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Handler:
    """Takes a request; answers with its body at once, or when the test says so."""

    def __init__(self, endpoint: "Endpoint", head) -> None:
        self.endpoint = endpoint
        self.target = head.target
        self.memory = None
        self.exchange = None
        self.copied = None
        self.large = None
        self.asked: list[int] = []
        self.ends: list[str] = []

    def body_memory(self, nbytes, body):
        if self.target == b"/full":
            self.ends.append("refused")
            raise BridgeError("no memory", ErrorCode.UNAVAILABLE)
        if body is None:
            self.memory = memoryview(bytearray(nbytes))
        else:
            self.large = PrivateMemory(nbytes, body)
            self.memory = self.large.memory
        return self.memory

    def grow(self, arrived):
        self.asked.append(arrived)
        return self.large.grow(arrived, len(self.memory))

    def complete(self, exchange, copied):
        self.copied = copied
        if self.large is not None:
            self.large.complete()
        if self.target == b"/wrong":
            raise BridgeError("wrong", ErrorCode.INVALID_ARG)
        self.ends.append("completed")
        self.exchange = exchange
        if not self.endpoint.deferred:
            self.answer()

    def answer(self) -> None:
        body = self.body
        half = len(body) // 2
        rest = memoryview(body)[half:]
        # Short buffers, an empty one, and a long one, if there is so much.
        buffers = [rest[:9], rest[9:9], rest[9:2000], rest[2000:2003], rest[2003:]]
        self.exchange.respond(200, b"Content-Type: x\r\n", body[:half], buffers)
        self.release()

    @property
    def body(self) -> bytes:
        return b"" if self.memory is None else bytes(self.memory)

    def abort(self):
        self.ends.append("aborted")
        self.release()

    def release(self):
        large, self.large = self.large, None
        if large is not None:
            large.close()


class Endpoint:
    """A connection with its transport, its handlers, and the network before it."""

    def __init__(
        self,
        *,
        deferred: bool = False,
        connections: HttpConnections = LIMITS,
        beside: "Endpoint | None" = None,
        body_limit: int = BODY_LIMIT,
        arena_limit: int = 1 << 30,
        descriptor: int = 3,
        origins: HttpOrigins | None = None,
    ) -> None:
        self.deferred = deferred
        self.handlers: list[Handler] = []
        self.connections: set[HttpConnection] = set() if beside is None else beside.connections
        settings = HttpSettings(body_limit, connections)
        budget = Budget(arena_limit) if beside is None else beside.listener.budget
        self.listener = HttpListener(self, settings, WORKERS, budget, origins=origins)
        if beside is not None:
            # What is idle is known to both; each has its own handlers.
            self.listener.idle = beside.listener.idle
        self.transport = Transport(descriptor)
        self.connection = HttpConnection(self.listener, self.connections)
        self.connection.connection_made(self.transport)
        self.undelivered: list[memoryview] = []

    def route(self, head):
        if head.target == b"/missing":
            raise BridgeError("missing", ErrorCode.NOT_FOUND)
        handler = Handler(self, head)
        self.handlers.append(handler)
        return handler

    def failure(self, error, status, _):
        return status or http_status(error.code), error_body(error)

    def receive(self, *pieces: bytes) -> None:
        """Let pieces arrive; what is not read (paused, closed) stays in ``undelivered``."""
        self.undelivered += [memoryview(piece) for piece in pieces if piece]
        while self.undelivered and self.transport.reading and self.transport.state != "closed":
            piece = self.undelivered.pop(0)
            buffer = memoryview(self.connection.get_buffer(-1))
            assert len(buffer) > 0
            taken = min(len(buffer), len(piece))
            buffer[:taken] = piece[:taken]
            if taken < len(piece):
                self.undelivered.insert(0, piece[taken:])
            self.connection.buffer_updated(taken)

    def end(self) -> None:
        """Let the client's end of file arrive, as asyncio would tell it."""
        if not self.connection.eof_received():
            self.transport.close()

    def lose(self) -> None:
        """Let the connection be gone."""
        self.transport.state = "closed"
        self.connection.connection_lost(None)

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of each answer sent so far; interim answers are left out."""
        return [(status, body) for status, _, body in parse_answers(bytes(self.transport.sent))]


def parse_answers(sent: bytes) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """Split what was sent into status, header and body of each answer; bodies are decompressed."""
    answers = []
    while sent:
        head, _, sent = sent.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        status = int(first.split(b" ")[1])
        if status == 100:
            continue
        fields = dict(line.split(b": ", 1) for line in lines)
        length = int(fields[b"Content-Length"])
        assert len(sent) >= length, "the answer is cut short"
        body, sent = sent[:length], sent[length:]
        if fields.get(b"Content-Encoding") in (b"gzip", b"deflate"):
            # Which of the two, it finds out.
            body = zlib.decompress(body, wbits=47)
        answers.append((status, fields, body))
    return answers
