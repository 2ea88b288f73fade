"""One HTTP/1.1 connection: bytes from the socket to handlers, answers back in order.

httptools parses every head and every chunked body. A body with a Content-Length is received by the
socket straight into the memory that its handler names; only what came together with the head is
copied there.

States::

    HEAD ──head complete──► BODY (direct: into the handler's memory; or discarded)
      ▲        │ chunked, compressed, or head in pieces        │
      │        ▼                                               │
      │     PARSED (through the parser, collected) ────────────┤
      └──────────────────────── message complete ◄─────────────┘
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import httptools

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.http.message import (
    RequestHandler,
    RequestHead,
    Router,
    accepted_coding,
    compress,
    decompress,
    response_head,
)

__all__ = ["HttpConnection", "HttpSettings"]

_RECEIVE_BYTES = 16 * 1024
_HEAD_LIMIT = 64 * 1024
_PIPELINE_LIMIT = 32
_DIGITS = re.compile(rb"[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of a connection.

    Attributes
    ----------
    body_limit : int
        Bytes of a request body, after decompression too.
    """

    body_limit: int


class _Answer:
    """An exchange: the place of one answer in the order of its connection."""

    __slots__ = ("_coding", "_connection", "_version", "close", "handler", "parts")

    def __init__(
        self, connection: HttpConnection, version: bytes, close: bool, coding: str | None
    ) -> None:
        self._connection = connection
        self._version = version
        self._coding = coding
        self.close = close
        self.handler: RequestHandler | None = None
        self.parts: list[bytes | memoryview] | None = None

    def respond(
        self, status: int, fields: bytes, body: bytes, buffers: Sequence[memoryview] = ()
    ) -> None:
        """Send the answer, or keep it until those before it are sent."""
        length = len(body)
        for buffer in buffers:
            length += len(buffer)
        if self._coding is not None and length:
            body = compress(self._coding, [body, *buffers])
            buffers = ()
            length = len(body)
            fields += b"Content-Encoding: %b\r\n" % self._coding.encode()
        self._send(response_head(status, fields, length), body, buffers)

    def fail(self, error: BridgeError) -> None:
        """Send an error as the answer."""
        self.fail_with(error, None)

    def fail_with(self, error: BridgeError, status: int | None) -> None:
        """Send an error as the answer, with a status of HTTP's own."""
        code, body = self._connection.router.failure(error, status)
        head = response_head(code, b"Content-Type: application/json\r\n", len(body))
        self._send(head, body, ())

    def _send(self, head: bytes, body: bytes, buffers: Sequence[memoryview]) -> None:
        if self.close:
            end = b"Connection: close\r\n\r\n"
        elif self._version == b"1.0":
            end = b"Connection: keep-alive\r\n\r\n"
        else:
            end = b"\r\n"
        self.handler = None
        self.parts = [b"".join((head, end, body)), *buffers]
        self._connection.answered()


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection.

    Parameters
    ----------
    router : Router
        Finds handlers.
    receive : bytearray
        Where bytes that have no other place yet are received; shared by all connections of an
        event loop, since each uses it up before it lets go of the loop.
    connections : set
        Holds this connection for as long as it is open.
    """

    def __init__(
        self,
        router: Router,
        settings: HttpSettings,
        receive: bytearray,
        connections: set[HttpConnection],
    ) -> None:
        self.router = router
        self._settings = settings
        self._receive = receive
        self._receive_view = memoryview(receive)
        self._connections = connections
        self._transport: asyncio.Transport
        self._answers: deque[_Answer] = deque()
        self._closing = False
        self._draining = False
        self._paused = False
        self._stalled = False
        self._head_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self._renew()

    def _renew(self) -> None:
        """Be ready for the next message."""
        self._head = RequestHead()
        self._fresh = True
        self._headed = False
        self._answer: _Answer | None = None
        self._handler: RequestHandler | None = None
        self._collected: bytearray | None = None
        self._memory: memoryview | None = None
        self._length = 0
        self._missing = 0
        self._copied = 0
        self._direct = False

    # -- what asyncio calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start."""
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self._closing = True
        if self._handler is not None:
            self._handler.abort()
        for answer in self._answers:
            if answer.handler is not None and answer.handler is not self._handler:
                answer.handler.abort()
        self._handler = None
        self._memory = None
        self._answers.clear()

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        """Return where the next bytes go: into the body's own memory if it has one."""
        if self._direct and self._memory is not None:
            return self._memory[self._length - self._missing :]
        return self._receive

    def buffer_updated(self, nbytes: int) -> None:
        """Take ``nbytes`` that have come."""
        if self._direct and self._memory is not None:
            self._missing -= nbytes
            if not self._missing:
                self._body_complete()
        else:
            self._take(nbytes)

    def eof_received(self) -> bool:
        """The client sends no more: answer what is asked, then close."""
        self._draining = True
        return bool(self._answers) and not self._missing

    def pause_writing(self) -> None:
        """The client reads too slowly: read no more from it."""
        self._stalled = True
        self._update_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled = False
        self._update_reading()

    def drain(self) -> None:
        """Answer what is asked already, then close."""
        self._draining = True
        if not self._answers and not self._headed:
            self._close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # -- bytes to messages ----------------------------------------------------------------------

    def _take(self, end: int) -> None:
        """Take the received bytes up to ``end``, through as many messages as they hold."""
        start = 0
        while start < end and not self._closing:
            if self._direct:
                start = self._take_body(start, end)
            elif self._fresh:
                cut = self._receive.find(b"\r\n\r\n", start, end)
                cut = end if cut < 0 else cut + 4
                self._feed(start, cut)
                start = cut
                self._direct = self._missing > 0
            else:
                # In the middle of a head, or of a body whose end only the parser can find.
                self._feed(start, end)
                self._direct = self._missing > 0
                return

    def _take_body(self, start: int, end: int) -> int:
        """Take bytes of a body that came with its head; returns where they end."""
        taken = min(end - start, self._missing)
        if self._memory is not None:
            at = self._length - self._missing
            self._memory[at : at + taken] = self._receive_view[start : start + taken]
            self._copied += taken
        self._missing -= taken
        if not self._missing:
            self._body_complete()
        return start + taken

    def _feed(self, start: int, end: int) -> None:
        if not self._headed:
            self._head_bytes += end - start
            if self._head_bytes > _HEAD_LIMIT:
                self._refuse(431, f"the request's head is longer than {_HEAD_LIMIT} bytes")
                return
        try:
            self._parser.feed_data(self._receive_view[start:end])
        except httptools.HttpParserUpgrade:
            # The request is answered as it is; what protocol the client wishes for is ignored.
            self._parser = httptools.HttpRequestParser(self)
        except httptools.HttpParserError as error:
            if not self._closing:
                self._refuse(400, f"malformed HTTP request: {error}")

    # -- what the parser calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A message starts."""
        self._fresh = False

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field."""
        self._head.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Find who takes the request, and where its body goes."""
        parser = self._parser
        head = self._head
        headers = head.headers
        head.method = parser.get_method()
        self._headed = True
        self._head_bytes = 0
        accepts = headers.get(b"accept-encoding")
        answer = _Answer(
            self,
            parser.get_http_version().encode(),
            self._draining or not parser.should_keep_alive(),
            accepted_coding(accepts) if accepts else None,
        )
        self._answer = answer
        self._answers.append(answer)
        if len(self._answers) >= _PIPELINE_LIMIT:
            self._update_reading()
        length = headers.get(b"content-length", b"0")
        if not _DIGITS.fullmatch(length) or int(length) > self._settings.body_limit:
            self._too_large(answer, length)
            return
        self._length = int(length)
        chunked = b"transfer-encoding" in headers
        if chunked or headers.get(b"content-encoding", b"identity") != b"identity":
            self._collected = bytearray()
        else:
            self._missing = self._length
        try:
            handler = self.router.route(head)
            if self._missing:
                self._memory = handler.body_memory(self._length)
        except BridgeError as error:
            answer.fail(error)
            return
        self._handler = answer.handler = handler
        if (self._length or chunked) and headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Part of a body that had to go through the parser."""
        if self._collected is not None:
            if len(self._collected) + len(body) > self._settings.body_limit:
                if self._answer is not None and self._answer.parts is None and not self._closing:
                    self._too_large(self._answer, b"chunked")
                return
            self._collected += body
        elif self._missing:
            if self._memory is not None:
                at = self._length - self._missing
                self._memory[at : at + len(body)] = body
                self._copied += len(body)
            self._missing -= len(body)

    def on_message_complete(self) -> None:
        """The parser saw the end of a message."""
        if not self._closing:
            self._complete()

    # -- messages to handlers ---------------------------------------------------------------------

    def _body_complete(self) -> None:
        """All of a body was received behind the parser's back: the parser has to start anew."""
        self._parser = httptools.HttpRequestParser(self)
        self._complete()

    def _complete(self) -> None:
        answer, handler, collected = self._answer, self._handler, self._collected
        copied = self._copied
        coding = self._head.headers.get(b"content-encoding", b"identity")
        self._renew()
        if handler is None or answer is None:
            return
        try:
            if collected is not None:
                body = decompress(coding, collected, self._settings.body_limit)
                copied = len(body)
                if body:
                    handler.body_memory(copied)[:] = body
            handler.complete(answer, copied)
        except BridgeError as error:
            handler.abort()
            answer.fail(error)

    def _too_large(self, answer: _Answer, length: bytes) -> None:
        """Refuse a body that is too long to be read, even to its end."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.abort()
        answer.close = True
        answer.fail_with(
            BridgeError(
                f"request body of {length.decode('latin-1')} bytes: expected at most "
                f"{self._settings.body_limit} (--http-max-input-size)",
                ErrorCode.INVALID_ARG,
            ),
            413,
        )

    def _refuse(self, status: int, text: str) -> None:
        """Answer a message that cannot be read, after those before it; nothing after it is read."""
        answer = self._answer
        if answer is None or answer.parts is not None:
            answer = _Answer(self, b"1.1", True, None)
            self._answers.append(answer)
        if self._handler is not None:
            self._handler.abort()
            self._handler = None
        answer.close = True
        self._fresh = False
        self._draining = True
        self._transport.pause_reading()
        answer.fail_with(BridgeError(text, ErrorCode.INVALID_ARG), status)

    # -- answers ----------------------------------------------------------------------------------

    def answered(self) -> None:
        """An answer is there: send those whose turn it is."""
        answers = self._answers
        was_full = len(answers) >= _PIPELINE_LIMIT
        while answers and answers[0].parts is not None and not self._closing:
            answer = answers.popleft()
            parts = answer.parts
            assert parts is not None
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.writelines(parts)
            if answer.close:
                self._close()
                return
        if was_full:
            self._update_reading()
        if self._draining and not answers and not self._headed:
            self._close()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def _update_reading(self) -> None:
        wanted = not self._stalled and len(self._answers) < _PIPELINE_LIMIT
        if wanted == self._paused and not self._closing:
            self._paused = not wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
