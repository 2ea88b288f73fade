"""The answer to one request: made now or later, sent when its turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gpubridge.errors import BridgeError
from gpubridge.frontend.http.head import MessageHead
from gpubridge.frontend.http.message import RequestHandler, Router, compress, response_head

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
    """

    __slots__ = (
        "_bodiless",
        "_coding",
        "_on_ready",
        "_router",
        "_version",
        "close",
        "handler",
        "held",
        "parts",
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
        self.close = close
        self.held = 0
        self.handler: RequestHandler | None = None
        self.parts: list[bytes | memoryview] | None = None

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
        if self.close:
            end = b"Connection: close\r\n\r\n"
        elif self._version == "1.0":
            end = b"Connection: keep-alive\r\n\r\n"
        else:
            end = b"\r\n"
        self.handler = None
        if self._bodiless:
            self.parts = [head + end]
        else:
            self.parts = [b"".join((head, end, body)), *buffers]
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
        """Remove and return the answer whose turn it is, if it is there."""
        answers = self._answers
        if answers and answers[0].parts is not None:
            answer = answers.popleft()
            if answer.held:
                self._held -= answer.held
            return answer
        return None

    def drop_last(self) -> None:
        """Give the last place up: its request will never be whole."""
        self._answers.pop()

    def abort(self) -> None:
        """Tell every handler that has not answered that nobody waits any more."""
        answers, self._answers = self._answers, deque()
        for answer in answers:
            if answer.handler is not None:
                answer.handler.abort()
