"""Requests whose body is small, or does not matter: received whole, answered at once."""

from __future__ import annotations

from gpubridge.frontend.http.message import Exchange
from gpubridge.protocol.fields import invalid

__all__ = ["SmallBody"]

_LONGEST_BODY = 1 << 20


class SmallBody:
    """Takes one request; holds nothing but its body."""

    __slots__ = ("_body",)

    def __init__(self) -> None:
        self._body = bytearray()

    def body_memory(self, nbytes: int) -> memoryview:
        """Give the body a place.

        Raises
        ------
        BridgeError
            INVALID_ARG when it is longer than any that is meant.
        """
        if nbytes > _LONGEST_BODY:
            raise invalid(f"this path takes no body of {nbytes} bytes (at most {_LONGEST_BODY})")
        self._body = bytearray(nbytes)
        return memoryview(self._body)

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Answer; raises BridgeError for what cannot be."""
        raise NotImplementedError

    def abort(self) -> None:
        """Nothing is held."""
