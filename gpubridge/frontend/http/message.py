"""The parts of an HTTP exchange: what came, who takes it, what goes back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpubridge.config import HttpConnections
from gpubridge.errors import BridgeError, ErrorCode

__all__ = [
    "CONTINUE",
    "Exchange",
    "HttpSettings",
    "RequestHandler",
    "RequestHead",
    "Router",
    "accepted_coding",
    "compress",
    "decompress",
    "open_head",
    "response_head",
]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer; a client that has not asked for it ignores it (RFC 9110, 15.2.1)."""

_REASONS = {
    100: b"Continue",
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Not Allowed",
    408: b"Request Timeout",
    411: b"Length Required",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of a connection.

    Attributes
    ----------
    body_limit : int
        Bytes of a request body, after decompression too.
    connections : HttpConnections
        How many connections there may be, and how long they may take.
    """

    body_limit: int
    connections: HttpConnections

    def too_long(self, what: str) -> str:
        """Say that a body is longer than allowed."""
        return (
            f"request body {what}: expected at most {self.body_limit} bytes (--http-max-input-size)"
        )


@dataclass(slots=True)
class RequestHead:
    """The request line and the header fields.

    Attributes
    ----------
    target : bytes
        The request target as sent.
    headers : dict
        Values by lower-case name; of a repeated field the last.
    """

    method: bytes = b""
    target: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)


class RequestHandler(Protocol):
    """Takes one request: its body, then the whole of it, or its end before that."""

    def body_memory(self, nbytes: int) -> memoryview:
        """Return the memory that the body is received into.

        Raises
        ------
        BridgeError
            When there is none: the error is the answer.
        """

    def complete(self, exchange: Exchange, copied: int) -> None:
        """All of the request is there: answer it through the exchange, now or later.

        ``copied`` bytes at the start of the body were copied into its memory; the socket received
        the others there.
        """

    def abort(self) -> None:
        """The request will not be completed, or nobody waits for its answer any more."""


class Router(Protocol):
    """Finds who takes a request."""

    def route(self, head: RequestHead) -> RequestHandler:
        """Return the handler of a request.

        Raises
        ------
        BridgeError
            When there is none: the error is the answer.
        """

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, bytes]:
        """Return status and JSON body that tell an error; ``status`` goes before its own."""


class Exchange(Protocol):
    """Where the answer of one request goes."""

    def respond(
        self,
        status: int,
        fields: bytes,
        body: bytes,
        buffers: Sequence[memoryview] = (),
        *,
        plain: bool = False,
    ) -> None:
        """Send the answer: ``fields`` are header lines, ``buffers`` follow ``body`` uncopied.

        A ``plain`` one is not compressed, whatever the client accepts.
        """

    def fail(self, error: BridgeError) -> None:
        """Send an error as the answer."""

    def begin(
        self, status: int, fields: bytes, on_sent: Callable[[], None], filler: bytes = b""
    ) -> None:
        """Begin an answer of unknown length; ``on_sent`` is told whenever the client has read on.

        ``filler`` are bytes that mean nothing within it: they are sent once in a while to a client
        that sends no more, to learn whether it is still there.
        """

    def send(self, data: bytes) -> None:
        """Send more of an answer that was begun."""

    def end(self) -> None:
        """End an answer that was begun."""


def response_head(status: int, fields: bytes, length: int) -> bytes:
    """Return the status line and the header of a response; ``fields`` end in CRLF or are empty."""
    return b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\n" % (
        status,
        _REASONS.get(status, b"Unknown"),
        fields,
        length,
    )


def open_head(status: int, fields: bytes, *, chunked: bool) -> bytes:
    """Return the same for a response of unknown length."""
    coding = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    return b"HTTP/1.1 %d %b\r\n%b%b" % (status, _REASONS.get(status, b"Unknown"), fields, coding)


def accepted_coding(value: bytes) -> str | None:
    """Return the coding that an Accept-Encoding prefers of gzip and deflate, or None."""
    best: tuple[float, str] | None = None
    for part in value.decode("latin-1").split(","):
        name, _, parameters = part.partition(";")
        coding = name.strip().lower()
        if coding not in ("gzip", "deflate"):
            continue
        key, _, number = parameters.strip().partition("=")
        try:
            quality = float(number) if key.strip() == "q" else 1.0
        except ValueError:
            continue
        if quality > 0 and (best is None or quality > best[0]):
            best = quality, coding
    return best[1] if best else None


def compress(coding: str, parts: Sequence[bytes | memoryview], level: int = -1) -> bytes:
    """Compress the parts as one body, as well as ``level`` (zlib's) says."""
    packer = zlib.compressobj(level, wbits=31 if coding == "gzip" else 15)
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])


def decompress(coding: bytes, body: bytes | bytearray, limit: int) -> bytes:
    """Return a body as it was before its Content-Encoding was applied.

    Raises
    ------
    BridgeError
        UNSUPPORTED for another coding, INVALID_ARG for data that is not in it, or that would be
        longer than ``limit``.
    """
    coding = coding.strip().lower()
    if coding == b"identity":
        return bytes(body)
    if coding not in (b"gzip", b"deflate"):
        raise BridgeError("Unsupported compression type", ErrorCode.UNSUPPORTED)
    unpacker = zlib.decompressobj(wbits=31 if coding == b"gzip" else 15)
    try:
        data = unpacker.decompress(bytes(body), limit + 1)
    except zlib.error as error:
        raise BridgeError(
            f"the request body is not {coding.decode()} data: {error}", ErrorCode.INVALID_ARG
        ) from error
    if len(data) > limit:
        raise BridgeError(
            f"the decompressed request body is longer than the limit of {limit} bytes "
            "(--http-max-input-size)",
            ErrorCode.INVALID_ARG,
        )
    if not unpacker.eof:
        raise BridgeError(
            f"the request body ends in the middle of its {coding.decode()} data",
            ErrorCode.INVALID_ARG,
        )
    return data
