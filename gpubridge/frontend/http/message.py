"""The parts of an HTTP exchange: what came, who takes it, what goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpubridge.config import HttpConnections
from gpubridge.dataplane import HttpInferEndpoint
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Body, Slot


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of a connection.

    - ``body_limit``: bytes of a request body, after decompression too.
    - ``connections``: how many connections there may be, and how long they may take.
    """

    body_limit: int
    connections: HttpConnections

    def too_long(self, what: str) -> str:
        """Say that a body is longer than allowed."""
        return (
            f"request body {what}: expected at most {self.body_limit} bytes (--http-max-input-size)"
        )


class RequestHead(Protocol):
    """The request line and the header fields."""

    @property
    def method(self) -> bytes:
        """The method."""

    @property
    def target(self) -> bytes:
        """The request target as sent."""

    def field(self, name: bytes, /) -> bytes | None:
        """Return the value of a field by its lower-case name; of a repeated field the last."""


class RequestHandler(Protocol):
    """Takes one request: its body, then the whole of it, or its end before that."""

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Return the memory that the body is received into.

        ``body``: what a large body is charged to, as `grow` hands its memory out; released by who
        has it.

        Raises BridgeError when there is none: the error is the answer.
        """

    def grow(self, arrived: int) -> int:
        """Return how many bytes of a large body there is memory for, of which so many have come.

        Raises BridgeError: UNAVAILABLE without room for more.
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

        Raises BridgeError when there is none: the error is the answer.
        """

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, bytes]:
        """Return status and JSON body that tell an error; ``status`` goes before its own."""


class Exchange(Protocol):
    """Where the answer of one request goes.

    ``handler``: hears if nobody waits for the answer any more.
    """

    handler: RequestHandler | None

    def field(self, name: bytes, /) -> bytes | None:
        """Return the value of a field of the request; see `RequestHead.field`."""

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

    def infer(
        self,
        endpoint: HttpInferEndpoint,
        slot: Slot,
        body: tuple[int, int, int],
        copied: int,
        origin: object,
    ) -> bool:
        """Give an inference request that has a template to its model, and answer it.

        Returns whether it was taken, and answered if it could not be: no error is raised.

        - ``slot``: belongs to the request if that is taken.
        - ``body``: where in the slot the body begins, its bytes, and those of its JSON header.
        - ``copied``: bytes of the body that were copied.
        - ``origin``: where it comes from, should it be traced.
        """

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
