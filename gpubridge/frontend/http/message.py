"""HTTP exchanges: the interfaces of routers and handlers, limits, and the texts of malformed requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from gpubridge.config import HttpConnections
from gpubridge.dataplane import GrowingMemory, HttpExchange
from gpubridge.errors import BridgeError, Pieces
from gpubridge.host_shm import Body


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of a connection.

    ``body_limit``: bytes of a request body, also after decompression.
    """

    body_limit: int
    connections: HttpConnections

    def too_long(self, what: str) -> str:
        """Return the text for a body that is too long."""
        return (
            f"request body {what}: expected at most {self.body_limit} bytes (--http-max-input-size)"
        )


class RequestHandler(Protocol):
    """Handles one request: its body, then its completion or abort."""

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview | GrowingMemory:
        """Return the memory that the body is received into, as far as `grow` says; raises BridgeError.

        ``body``: the charge of a large body, which the handler grows and releases.
        """

    def grow(self, arrived: int) -> int:
        """Return how many bytes of a large body there is memory for, after ``arrived`` bytes.

        Raises BridgeError: UNAVAILABLE if memory has run out.
        """

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Respond to the complete request through the exchange, now or later.

        ``copied``: bytes of the body that were copied into its memory, not received there.
        """

    def abort(self) -> None:
        """Drop the request: it will not be completed, or its client is gone."""


class Router(Protocol):
    """Finds the handlers of requests."""

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return the handler of a request; raises BridgeError."""

    def failure(
        self, error: BridgeError, status: int | None, head: HttpExchange
    ) -> tuple[int, Pieces]:
        """Return the status and the JSON body of an error; ``status`` replaces its own."""


_SHOWN = 200
"""Bytes of a client's header in an error."""


class Fault(enum.IntEnum):
    """Numbers of ``http1::Fault`` (``csrc/net/http1_reader.h``) whose texts name sizes."""

    BODY_TOO_LONG = 16
    CHUNKS_TOO_LONG = 17


def other_page(head: HttpExchange) -> str:
    """Return the text for a request of a page whose origin is not allowed."""
    origin = _shown(head.field(b"origin"))
    which = f"from {origin}" if origin else "of another origin"
    return (
        f"expected a program or a page of this server, got a request of a page {which}: "
        f"--http-allowed-origins={origin or 'ORIGIN'} lets its pages ask this server"
    )


def other_host(head: HttpExchange) -> str:
    """Return the text for a request to a host that is not this server's."""
    host = _shown(head.field(b"host"))
    return (
        f"expected localhost or an address as the host, got '{host}': this server listens for this machine "
        f"only; --http-allowed-origins=http://{host} lets it be asked for by that name"
    )


def _shown(text: bytes | None) -> str:
    return "" if text is None else text[:_SHOWN].decode("latin-1")


_MALFORMED = "malformed HTTP request: "

FAULTS: tuple[tuple[int, str], ...] = (
    (400, _MALFORMED + "expected a method of at most 32 letters and a blank"),
    (400, _MALFORMED + "expected a path as the target, without blanks and controls"),
    (400, _MALFORMED + "expected HTTP/1.1 or HTTP/1.0 and a line end after the target"),
    (400, _MALFORMED + "expected HTTP/1, got the preface of HTTP/2 (gRPC has a port of its own)"),
    (400, _MALFORMED + "expected lines that end in CR LF"),
    (400, _MALFORMED + "expected a field name and a colon"),
    (400, _MALFORMED + "got a control character in the value of a field"),
    (400, _MALFORMED + "got a folded line, or a blank before the first field"),
    (431, "the request's head is longer than 65536 bytes"),
    (431, "the request's head has more than 1024 fields"),
    (400, _MALFORMED + "expected a decimal number as Content-Length"),
    (400, _MALFORMED + "got Content-Length twice"),
    (400, _MALFORMED + "expected chunked, in HTTP/1.1 and once, as Transfer-Encoding"),
    (400, _MALFORMED + "got both Content-Length and Transfer-Encoding"),
    (400, _MALFORMED + "expected the size of a chunk in hexadecimal digits"),
    (400, _MALFORMED + "expected a line end after a chunk"),
)
"""Status and text of the other faults, by number."""

_PLAIN = b'{"error":"expected TLS, got a request without it: use https://"}'
PLAIN_TO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_PLAIN), _PLAIN)
)
"""The response to a request without TLS on a TLS endpoint."""
