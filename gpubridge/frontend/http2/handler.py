"""What a connection tells the one who serves its streams."""

from __future__ import annotations

from typing import Protocol

from gpubridge.frontend.http2.faults import Http2ErrorCode
from gpubridge.frontend.http2.headers import Fields, RequestHeaders

__all__ = ["StreamHandler"]


class StreamHandler(Protocol):
    """Called from within ``received`` and ``take_output``.

    Any of these may call every method of the connection but ``received`` and ``take_output``. They
    must not raise: an exception goes to whoever called the connection.
    """

    def on_headers(self, stream_id: int, headers: RequestHeaders, end: bool) -> None:
        """A request begins; with ``end`` it has no body."""

    def on_data(self, stream_id: int, view: memoryview, end: bool) -> None:
        """Body bytes came; ``view`` is the connection's own buffer, only valid in this call."""

    def on_filled(self, stream_id: int, end: bool) -> None:
        """The memory given to ``receive_into`` is full; with ``end`` nothing follows."""

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """The request ends with trailers."""

    def on_reset(self, stream_id: int, code: int) -> None:
        """The stream is gone: the peer reset it, or broke a rule (then ``code`` is ours)."""

    def on_writable(self, stream_id: int) -> None:
        """All that was queued for the stream has been handed out."""

    def on_ping(self) -> None:
        """The peer has sent a PING, which is answered."""

    def on_pong(self, payload: bytes) -> None:
        """Our ``ping`` was answered."""

    def on_closed(self, code: Http2ErrorCode, text: str) -> None:
        """The connection is over and its streams are gone: send the output and close."""
