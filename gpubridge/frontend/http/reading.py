"""Bytes that a client sends, to requests in the hands of their handlers.

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
from gpubridge.frontend.http.reader_owner import ReaderOwner
from gpubridge.frontend.http.watch import NO_PROGRESS, Stage

__all__ = ["RequestReader"]

_HEAD_LIMIT = 64 * 1024
_HEAVY = 64 * 1024
"""Smaller bodies are not weighed: a connection has few of them."""


class RequestReader:
    """The receiving half of a connection.

    Parameters
    ----------
    router : Router
        Finds handlers.
    receive : bytearray
        Where bytes that have no other place yet are received; shared by all connections of an
        event loop, since each uses it up before it lets go of the loop.
    answers : AnswerQueue
        Where each request's answer takes its place.
    owner : ReaderOwner
        The connection.

    Attributes
    ----------
    headed : bool
        A request's head is there, and its body is not yet.
    last : bool
        No request is read behind the one that is on its way.
    deaf : bool
        Nothing is read any more.
    unread : bool
        The client was cut off: it may still be sending.
    crowded : bool
        No further request is to be taken for now.
    """

    def __init__(
        self,
        router: Router,
        settings: HttpSettings,
        receive: bytearray,
        answers: AnswerQueue,
        owner: ReaderOwner,
    ) -> None:
        self.last = self.deaf = self.unread = self.crowded = False
        self._rest = b""
        self._router = router
        self._settings = settings
        self._receive = receive
        self._receive_view = memoryview(receive)
        self._answers = answers
        self._owner = owner
        self._head_bytes = 0
        self._parser = httptools.HttpRequestParser(self)
        self._parsing = False
        self._head = RequestHead()
        # The last head that came in one piece, and what it said: a client's heads repeat.
        self._known_head = b""
        self._known: MessageHead | None = None
        self._simple: MessageHead | None = None
        self._renew()

    def _renew(self) -> None:
        """Be ready for the next message."""
        self._fresh = True
        self.headed = False
        self._answer: Answer | None = None
        self._handler: RequestHandler | None = None
        self._collected: bytearray | None = None
        self._memory: memoryview | None = None
        self._length = self._missing = self._copied = 0
        self._direct = False

    # -- the socket ---------------------------------------------------------------------------

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

    def go_on(self) -> None:
        """Take the requests that had come, but found it crowded."""
        rest, self._rest = self._rest, b""
        if not self.deaf:
            self._receive_view[: len(rest)] = rest
            self._take(len(rest))

    @property
    def behind(self) -> bool:
        """Whether there are such requests; nothing may be received before them."""
        return bool(self._rest)

    def end(self) -> None:
        """The client sends no more: a request that is on its way will never be whole."""
        self.last = self.deaf = True
        self.unread = False
        if self.headed:
            if self._handler is not None:
                self._handler.abort()
            if self._answer is not None and self._answer.parts is None:
                self._answers.drop_last()
            self._renew()

    def lose(self) -> None:
        """The socket is gone; the handlers are told by their answers."""
        self.deaf = True
        self._handler = None
        self._memory = None

    def progress(self) -> tuple[Stage, object, int]:
        """Return where the message that is on its way is, something of its own, and its bytes.

        Returns
        -------
        stage : Stage
            NOTHING when none is on its way, or when no more is read.
        message : object
            Another one for each message.
        nbytes : int
            How much of its body is there.
        """
        if self.deaf:
            return NO_PROGRESS
        if self.headed:
            collected = self._collected
            nbytes = self._length - self._missing if collected is None else len(collected)
            return Stage.BODY, self._answer, nbytes
        return NO_PROGRESS if self._fresh else (Stage.HEAD, self._head, 0)

    # -- bytes to messages ----------------------------------------------------------------------

    def _take(self, end: int) -> None:
        """Take the received bytes up to ``end``, through as many messages as they hold."""
        start = 0
        while start < end and not self.deaf:
            if self._direct:
                start = self._take_body(start, end)
            elif self._fresh:
                if self.crowded:
                    self._rest = bytes(self._receive_view[start:end])
                    return
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
            if not known.length and not self.deaf:
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
            self.refuse(431, f"the request's head is longer than {_HEAD_LIMIT} bytes")
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
            self.refuse(400, f"malformed HTTP request: {error}")
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
        if not self.headed:
            self._head.headers[name.lower()] = value.rstrip()

    def on_headers_complete(self) -> None:
        """Find who takes the request, and where its body goes."""
        if self.deaf:
            return
        self._head.method = self._parser.get_method()
        self._head_bytes = 0
        message = read_head(self._parser, self._head)
        if message.length is None or message.length > self._settings.body_limit:
            self._place_answer(message)
            told = self._head.headers[b"content-length"].decode("latin-1")
            self.refuse(413, self._settings.too_long(f"of {told} bytes"))
        elif message.chunked and message.upgrade:
            self._place_answer(message)
            self.refuse(
                501, "Upgrade with a chunked body is not served: send one without the other"
            )
        else:
            if not message.collected and not message.upgrade:
                self._simple = message
            self._begin(message, message.length)

    def _place_answer(self, message: MessageHead) -> Answer:
        """Take the next place in the order of answers for a message whose head is there."""
        self.headed = True
        answer = self._answer = self._answers.place(message, last=self.last)
        if self._answers.full:
            self._owner.update_reading()
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
            handler = self._router.route(message.request)
            if self._missing:
                self._memory = handler.body_memory(length)
        except BridgeError as error:
            answer.fail(error)
            return
        self._handler = answer.handler = handler
        if message.expects:
            self._owner.tell(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Part of a body that had to go through the parser."""
        self._head_bytes = 0
        if self.deaf:
            return
        if self._collected is not None:
            if len(self._collected) + len(body) > self._settings.body_limit:
                self.refuse(413, self._settings.too_long("in chunks"))
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
        if not self.deaf and not self._missing:
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
        copied, length = self._copied, self._length
        coding = self._head.headers.get(b"content-encoding", b"identity")
        self._renew()
        if answer is not None and answer.close:
            self.deaf = True
        if handler is None or answer is None:
            self._owner.close_when_done()
            return
        try:
            if collected is not None:
                body = decompress(coding, collected, self._settings.body_limit)
                copied = length = len(body)
                if body:
                    handler.body_memory(copied)[:] = body
            if length >= _HEAVY:
                self._weigh(answer, length)
            handler.complete(answer, copied)
        except BridgeError as error:
            handler.abort()
            answer.fail(error)

    def _weigh(self, answer: Answer, nbytes: int) -> None:
        """Count what a request holds until it is answered."""
        self._answers.weigh(answer, nbytes)
        if self._answers.full:
            self._owner.update_reading()

    def refuse(self, status: int, text: str) -> None:
        """Answer a message that cannot be read, after those before it; nothing after it is read."""
        answer = self._answer
        if self._handler is not None:
            self._handler.abort()
            self._handler = None
        self._memory = None
        self._missing = 0
        self.headed = False
        self.deaf = self.unread = True
        if answer is not None and answer.parts is not None:
            # It was refused before for another reason, which is its answer.
            self.last = True
            self._owner.close_when_done()
            return
        if answer is None:
            answer = self._answers.place(None, last=True)
        answer.close = True
        answer.fail_with(BridgeError(text, ErrorCode.INVALID_ARG), status)
