"""Bodies in memory of this process: of requests that are answered at once, or are read as a whole."""

from __future__ import annotations

from gpubridge.errors import invalid
from gpubridge.frontend.http.message import Exchange
from gpubridge.host_shm import Body, PrivateMemory

CONTROL_BYTES = 4 << 20
"""Limit of a message to a method that is no inference, over HTTP and gRPC."""


class PrivateBody:
    """Takes one request, with its body.

    ``body``: what has been received.
    """

    __slots__ = ("_private", "body")

    def __init__(self) -> None:
        self.body = memoryview(b"")
        self._private: PrivateMemory | None = None

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Give the body a place."""
        if body is None:
            self.body = memoryview(bytearray(nbytes))
        else:
            self._private = PrivateMemory(nbytes, body)
            self.body = self._private.memory
        return self.body

    def grow(self, arrived: int) -> int:
        """Return how much of a large body there is memory for."""
        assert self._private is not None
        return self._private.grow(arrived, len(self.body))

    def whole_body(self) -> memoryview:
        """Return all of the body, which has come: it is not refused any more."""
        if self._private is not None:
            self._private.complete()
        return self.body

    def release(self) -> None:
        """Let go of the body, which counts no more; views of it keep it."""
        self.body = memoryview(b"")
        private, self._private = self._private, None
        if private is not None:
            private.close()

    def abort(self) -> None:
        """The request will not be completed, or nobody waits for its answer any more."""
        self.release()


class SmallBody(PrivateBody):
    """Takes one request whose body is small, or does not matter."""

    __slots__ = ()

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Give the body a place.

        Raises BridgeError: INVALID_ARG when it is longer than any that is meant.
        """
        if nbytes > CONTROL_BYTES:
            raise invalid(f"this path takes no body of {nbytes} bytes (at most {CONTROL_BYTES})")
        return super().body_memory(nbytes, body)

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Answer, and let go of the body; raises BridgeError for what cannot be."""
        self.whole_body()
        try:
            self.answer(exchange)
        finally:
            self.release()

    def answer(self, exchange: Exchange) -> None:
        """Answer; the body is read before this returns."""
        raise NotImplementedError
