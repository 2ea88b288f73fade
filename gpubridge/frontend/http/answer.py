"""The answer to one request: made now or later, sent when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpubridge.errors import BridgeError
from gpubridge.frontend.http.message import RequestHandler, Router, compress, response_head

__all__ = ["Answer"]


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
    parts : list or None
        The bytes of the answer, once it is there.
    """

    __slots__ = ("_bodiless", "_coding", "_on_ready", "_router", "_version", "close", "handler", "parts")

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
