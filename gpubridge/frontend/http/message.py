"""The parts of an HTTP exchange: what came, who takes it, what goes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpubridge.config import HttpConnections
from gpubridge.dataplane import HttpExchange
from gpubridge.errors import BridgeError, Pieces
from gpubridge.host_shm import Body


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of a connection.

    ``body_limit``: bytes of a request body, after decompression too.
    """

    body_limit: int
    connections: HttpConnections

    def too_long(self, what: str) -> str:
        """Say that a body is longer than allowed."""
        return (
            f"request body {what}: expected at most {self.body_limit} bytes (--http-max-input-size)"
        )


class RequestHandler(Protocol):
    """Takes one request: its body, then the whole of it, or its end before that."""

    def body_memory(self, nbytes: int, body: Body | None) -> memoryview:
        """Return the memory that the body is received into; raises BridgeError.

        ``body``: what a large body is charged to, as `grow` hands its memory out; released by who
        has it.
        """

    def grow(self, arrived: int) -> int:
        """Return how many bytes of a large body there is memory for, of which so many have come.

        Raises BridgeError: UNAVAILABLE without room for more.
        """

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """All of the request is there: answer it through the exchange, now or later.

        ``copied`` bytes at the start of the body were copied into its memory; the socket received
        the others there.
        """

    def abort(self) -> None:
        """The request will not be completed, or nobody waits for its answer any more."""


class Router(Protocol):
    """Finds who takes a request."""

    def route(self, head: HttpExchange) -> RequestHandler:
        """Return the handler of a request; raises BridgeError."""

    def failure(self, error: BridgeError, status: int | None) -> tuple[int, Pieces]:
        """Return status and JSON body that tell an error; ``status`` goes before its own."""
