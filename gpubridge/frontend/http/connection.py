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

import httptools

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.http.answer import Answer, AnswerQueue
from gpubridge.frontend.http.head import MessageHead, read_head
from gpubridge.frontend.http.message import (
    HttpSettings,
    RequestHandler,
    RequestHead,
    Router,
    decompress,
)

__all__ = ["HttpConnection", "HttpSettings"]

_HEAD_LIMIT = 64 * 1024


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
        self._answers = AnswerQueue(router, self.answered)
        self._closing = self._draining = False
        self._deaf = self._unread = False
        self._paused = self._stalled = False
        self._head_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self._parsing = False
        self._head = RequestHead()
        self._known_head = b""  # the last head that came in one piece: a client's heads repeat
        self._known: MessageHead | None = None
        self._simple: MessageHead | None = None
        self._renew()

    def _renew(self) -> None:
        """Be ready for the next message."""
        self._fresh = True
        self._headed = False
        self._answer: Answer | None = None
        self._handler: RequestHandler | None = None
        self._collected: bytearray | None = None
        self._memory: memoryview | None = None
        self._length = self._missing = self._copied = 0
        self._direct = False

    # -- what asyncio calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start."""
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self._closing = self._deaf = True
        self._answers.abort()
        self._handler = None
        self._memory = None

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
        self._draining = self._deaf = True
        if self._headed:
            # The request that was on its way will never be whole.
            if self._handler is not None:
                self._handler.abort()
            if self._answer is not None and self._answer.parts is None:
                self._answers.drop_last()
            self._renew()
        return bool(self._answers) and not self._closing

    def pause_writing(self) -> None:
        """The client reads too slowly: read no more from it."""
        self._stalled = True
        self._update_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled = False
        self._update_reading()
        self._answers.client_reads()

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
        while start < end and not self._deaf:
            if self._direct:
                start = self._take_body(start, end)
            elif self._fresh:
                start = self._take_head(start, end)
                self._direct = self._missing > 0
            else:
                # In the middle of a head, or of a body whose end only the parser can find.
                start = self._feed(start, end)
                self._direct = self._missing > 0

    def _take_head(self, start: int, end: int) -> int:
        """Take a head, or the first part of one; returns where it ends."""
        known = self._known
        if known is not None and self._receive.startswith(self._known_head, start, end):
            self._begin(known, known.length or 0)
            if not known.length and not self._deaf:
                self._complete()
            return start + len(self._known_head)
        cut = self._receive.find(b"\r\n\r\n", start, end)
        if cut < 0:
            return self._feed(start, end)
        cut += 4
        self._simple = None
        stopped = self._feed(start, cut)
        if self._simple is not None and stopped == cut:
            self._known = self._simple
            self._known_head = bytes(self._receive_view[start:cut])
        return stopped

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

    def _feed(self, start: int, end: int) -> int:
        """Have received bytes parsed; returns where the parser stopped."""
        # Counted from the last piece of body on, so that trailers and chunk extensions have an end.
        self._head_bytes += end - start
        if self._head_bytes > _HEAD_LIMIT:
            self._refuse(431, f"the request's head is longer than {_HEAD_LIMIT} bytes")
            return end
        self._parsing = True
        try:
            self._parser.feed_data(self._receive_view[start:end])
        except httptools.HttpParserUpgrade as upgrade:
            # The request is answered as it is; what protocol the client wishes for is ignored. The
            # parser stops after the head: a body is received behind its back.
            self._parser = httptools.HttpRequestParser(self)
            return start + int(upgrade.args[0])
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        return end

    # -- what the parser calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A message starts."""
        self._fresh = False
        self._head = RequestHead()

    def on_url(self, url: bytes) -> None:
        """Part of the request target."""
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field; those of a trailer are nothing that anyone asks for."""
        if not self._headed:
            self._head.headers[name.lower()] = value.rstrip()

    def on_headers_complete(self) -> None:
        """Find who takes the request, and where its body goes."""
        if self._deaf:
            return
        self._head.method = self._parser.get_method()
        self._head_bytes = 0
        message = read_head(self._parser, self._head)
        if message.length is None or message.length > self._settings.body_limit:
            self._place_answer(message)
            told = self._head.headers[b"content-length"].decode("latin-1")
            self._refuse(413, self._settings.too_long(f"of {told} bytes"))
        elif message.chunked and message.upgrade:
            self._place_answer(message)
            self._refuse(
                501, "Upgrade with a chunked body is not served: send one without the other"
            )
        else:
            if not message.collected and not message.upgrade:
                self._simple = message
            self._begin(message, message.length)

    def _place_answer(self, message: MessageHead) -> Answer:
        """Take the next place in the order of answers for a message whose head is there."""
        self._headed = True
        answer = self._answer = self._answers.place(message, last=self._draining)
        if self._answers.full:
            self._update_reading()
        return answer

    def _begin(self, message: MessageHead, length: int) -> None:
        """Find who takes the message, and where its body goes."""
        answer = self._place_answer(message)
        self._length = length
        if message.collected:
            self._collected = bytearray()
        else:
            self._missing = length
        try:
            handler = self.router.route(message.request)
            if self._missing:
                self._memory = handler.body_memory(length)
        except BridgeError as error:
            answer.fail(error)
            return
        self._handler = answer.handler = handler
        if message.expects:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Part of a body that had to go through the parser."""
        self._head_bytes = 0
        if self._deaf:
            return
        if self._collected is not None:
            if len(self._collected) + len(body) > self._settings.body_limit:
                self._refuse(413, self._settings.too_long("in chunks"))
                return
            self._collected += body
        elif self._missing:
            if self._memory is not None:
                at = self._length - self._missing
                self._memory[at : at + len(body)] = body
                self._copied += len(body)
            self._missing -= len(body)

    def on_message_complete(self) -> None:
        """The parser saw the end of a message, or does not care for the body (an upgrade)."""
        if not self._deaf and not self._missing:
            self._complete()

    # -- messages to handlers ---------------------------------------------------------------------

    def _body_complete(self) -> None:
        """All of a body was received behind the parser's back: one that saw the head starts anew."""
        if self._parsing:
            self._parser = httptools.HttpRequestParser(self)
            self._parsing = False
        self._complete()

    def _complete(self) -> None:
        answer, handler, collected = self._answer, self._handler, self._collected
        copied = self._copied
        coding = self._head.headers.get(b"content-encoding", b"identity")
        self._renew()
        if answer is not None and answer.close:
            self._deaf = True
        if handler is None or answer is None:
            if self._draining and not self._answers:
                self._close()
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

    def _refuse(self, status: int, text: str) -> None:
        """Answer a message that cannot be read, after those before it; nothing after it is read."""
        answer = self._answer
        if self._handler is not None:
            self._handler.abort()
            self._handler = None
        self._memory = None
        self._missing = 0
        self._headed = False
        self._deaf = self._unread = True
        if answer is not None and answer.parts is not None:
            # It was refused before for another reason, which is its answer.
            self._draining = True
            if not self._answers:
                self._close()
            return
        if answer is None:
            answer = self._answers.place(None, last=True)
        answer.close = True
        answer.fail_with(BridgeError(text, ErrorCode.INVALID_ARG), status)

    # -- answers ----------------------------------------------------------------------------------

    def answered(self) -> None:
        """An answer is there: send those whose turn it is."""
        answers = self._answers
        was_full = answers.full
        while not self._closing:
            answer = answers.take_ready()
            if answer is None:
                break
            parts = answer.take_parts()
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.writelines(parts)
            if answer.unfinished and not self._stalled:
                answers.client_reads()
            elif answer.close and not answer.unfinished:
                self._close()
                return
        if was_full:
            self._update_reading()
        if self._draining and not answers and not self._headed:
            self._close()

    def _close(self) -> None:
        self._deaf = True
        was_closing, self._closing = self._closing, True
        if (self._unread or self._headed) and not was_closing:
            # The client may still be sending: after a close now the kernel would reset the connection,
            # and the client lose its answer. What comes is dropped until the client closes, too.
            self._transport.write_eof()
        else:
            self._transport.close()

    def _update_reading(self) -> None:
        wanted = not self._stalled and not self._answers.full
        if wanted == self._paused and not self._closing:
            self._paused = not wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
