"""The answer to one request: made now or later, sent when its turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gpubridge.errors import BridgeError
from gpubridge.frontend.http.head import MessageHead
from gpubridge.frontend.http.message import (
    CONTINUE,
    RequestHandler,
    Router,
    compress,
    open_head,
    response_head,
)

__all__ = ["Answer", "AnswerQueue"]

_PIPELINE_LIMIT = 32
_HELD_LIMIT = 64 << 20
"""Bytes of bodies that a connection's requests may hold before no further one is read."""


class Answer:
    """An exchange: the place of one answer in the order of its connection.

    Parameters
    ----------
    router : Router
        Knows how errors look.
    on_ready : callable
        Told when :attr:`parts` are there.
    close : bool
        Whether the connection ends with this answer.
    version : str
        Of the request's HTTP.
    coding : str or None
        The content coding that the client would like.
    bodiless : bool
        Whether the body is left out (HEAD).

    Attributes
    ----------
    handler : RequestHandler or None
        Who has the request and has not answered yet.
    held : int
        Bytes that the request holds, as far as they were weighed.
    parts : list or None
        The bytes of the answer, once it is there.
    unfinished : bool
        Whether others follow those in :attr:`parts`.
    on_sent : callable or None
        To be told when they are sent, and the client reads.
    """

    __slots__ = (
        "_bodiless",
        "_chunked",
        "_coding",
        "_filler",
        "_on_ready",
        "_probed",
        "_router",
        "_version",
        "close",
        "handler",
        "held",
        "on_sent",
        "parts",
        "unfinished",
    )

    def __init__(
        self,
        router: Router,
        on_ready: Callable[[], None],
        *,
        close: bool,
        version: str = "1.1",
        coding: str | None = None,
        bodiless: bool = False,
    ) -> None:
        self._router = router
        self._on_ready = on_ready
        self._version = version
        self._coding = coding
        self._bodiless = bodiless
        self._probed = False
        self._filler = b""
        self.close = close
        self.held = 0
        self.handler: RequestHandler | None = None
        self.parts: list[bytes | memoryview] | None = None
        self.unfinished = False
        self.on_sent: Callable[[], None] | None = None

    def respond(
        self,
        status: int,
        fields: bytes,
        body: bytes,
        buffers: Sequence[memoryview] = (),
        *,
        plain: bool = False,
    ) -> None:
        """Send the answer, or keep it until those before it are sent."""
        length = len(body)
        for buffer in buffers:
            length += len(buffer)
        if self._coding is not None and length and not plain:
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
        code, body = self._router.failure(error, status)
        head = response_head(code, b"Content-Type: application/json\r\n", len(body))
        self._send(head, body, ())

    def _send(self, head: bytes, body: bytes, buffers: Sequence[memoryview]) -> None:
        self.handler = None
        if self._bodiless:
            self.parts = [head + self._head_end()]
        else:
            self.parts = [b"".join((head, self._head_end(), body)), *buffers]
        self._on_ready()

    def _head_end(self) -> bytes:
        if self.close:
            return b"Connection: close\r\n\r\n"
        if self._version == "1.0":
            return b"Connection: keep-alive\r\n\r\n"
        return b"\r\n"

    def begin(
        self, status: int, fields: bytes, on_sent: Callable[[], None], filler: bytes = b""
    ) -> None:
        """Begin an answer of unknown length: in chunks, or up to the end of the connection."""
        self._filler = filler
        self._chunked = self._version != "1.0"
        if not self._chunked:
            self.close = True
        self.unfinished = True
        self.on_sent = on_sent
        head = open_head(status, fields, chunked=self._chunked)
        self.parts = [head + self._head_end()]
        self._on_ready()

    def send(self, data: bytes) -> None:
        """Send more of an answer that was begun."""
        if not self._bodiless:
            self._add(self._chunk(data))

    def end(self) -> None:
        """End an answer that was begun."""
        self.handler = None
        self.unfinished = False
        self._add(b"0\r\n\r\n" if self._chunked and not self._bodiless else b"")

    def probe(self) -> bytes:
        """Return bytes that change nothing for a client that waits, at most once between others.

        A client whose connection is closed answers them by a reset. Before an answer they are an
        interim one, within one that was begun what its maker named.
        """
        if self.parts is not None or self._probed:
            return b""
        self._probed = True
        if not self.unfinished:
            return CONTINUE if self._version == "1.1" else b""
        return self._chunk(self._filler) if self._filler and not self._bodiless else b""

    def take_parts(self) -> list[bytes | memoryview]:
        """Return the bytes that are there; those that follow are others."""
        parts = self.parts
        assert parts is not None
        if self.unfinished:
            self.parts = None
        return parts

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _add(self, data: bytes) -> None:
        self._probed = False
        if self.parts is None:
            self.parts = []
        self.parts.append(data)
        self._on_ready()


class AnswerQueue:
    """The answers of a connection that are still to be sent, in the order of their requests.

    Parameters
    ----------
    router : Router
        Knows how errors look.
    on_ready : callable
        Told when an answer is there.

    Attributes
    ----------
    placed : int
        How many answers have had a place so far.
    """

    __slots__ = ("_answers", "_held", "_on_ready", "_router", "placed")

    def __init__(self, router: Router, on_ready: Callable[[], None]) -> None:
        self._router = router
        self._on_ready = on_ready
        self._answers: deque[Answer] = deque()
        self._held = 0
        self.placed = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def full(self) -> bool:
        """Whether so many are open, or hold so much, that no further request should be read."""
        count = len(self._answers)
        # A single one, however large, is no reason: that its client goes away must be seen.
        return count >= _PIPELINE_LIMIT or (self._held >= _HELD_LIMIT and count > 1)

    def place(self, message: MessageHead | None, *, last: bool) -> Answer:
        """Take the next place, for a message or (None) for what could not be read as one.

        Parameters
        ----------
        last : bool
            Whether the connection ends with the answer, whatever the message says.
        """
        if message is None:
            answer = Answer(self._router, self._on_ready, close=last)
        else:
            answer = Answer(
                self._router,
                self._on_ready,
                close=last or message.close,
                version=message.version,
                coding=message.coding,
                bodiless=message.request.method == b"HEAD",
            )
        self._answers.append(answer)
        self.placed += 1
        return answer

    def weigh(self, answer: Answer, nbytes: int) -> None:
        """Count what a request holds from now on, until its answer is taken."""
        answer.held = nbytes
        self._held += nbytes

    def take_ready(self) -> Answer | None:
        """Return the answer whose turn it is, if it or more of it is there; remove a finished one."""
        answers = self._answers
        if answers and answers[0].parts is not None:
            answer = answers[0]
            if not answer.unfinished:
                answers.popleft()
                if answer.held:
                    self._held -= answer.held
            return answer
        return None

    def client_reads(self) -> None:
        """Tell the answer whose turn it is, if it is unfinished, that what it had sent is read."""
        answers = self._answers
        if answers and answers[0].on_sent is not None and answers[0].parts is None:
            answers[0].on_sent()

    def probe(self) -> bytes:
        """Return what can be sent now to learn whether the client is still there; b"" for nothing."""
        return self._answers[0].probe() if self._answers else b""

    def drop_last(self) -> None:
        """Give the last place up: its request will never be whole."""
        self._answers.pop()

    def abort(self) -> None:
        """Tell every handler that has not answered that nobody waits any more."""
        answers, self._answers = self._answers, deque()
        for answer in answers:
            if answer.handler is not None:
                answer.handler.abort()
