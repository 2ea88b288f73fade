"""Calls that came as a whole in one read, as small ones do: found by the compiled module.

A call is HEADERS in one frame, with a block whose meaning is known and without END_STREAM, and DATA
in one frame with END_STREAM; before each there may be WINDOW_UPDATE frames of the connection, before
DATA of the stream as well. What is anything else, or breaks a rule, is left where it is: the receiver
takes it frame by frame. Without the compiled module it takes everything so.
"""

from __future__ import annotations

from gpubridge.frontend.http2.flow import MAX_WINDOW
from gpubridge.frontend.http2.frames import END_STREAM, HEADER_BYTES
from gpubridge.frontend.http2.headers import RequestHeaders
from gpubridge.frontend.http2.payload import PayloadReceiver
from gpubridge.frontend.http2.sending import Sender
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.streams import Stream
from gpubridge.tensor.native import native

__all__ = ["WholeCalls"]


class WholeCalls:
    """Takes whole calls out of a connection's buffer.

    Parameters
    ----------
    state : ConnectionState
        Where streams are opened.
    payload : PayloadReceiver
        Takes their data.
    sender : Sender
        Gets what window updates give.
    known : dict
        What header blocks mean.
    buffer : bytearray
        What is received lies here.
    longest : int
        Bytes of the longest frame that is taken.
    """

    def __init__(
        self,
        state: ConnectionState,
        payload: PayloadReceiver,
        sender: Sender,
        known: dict[bytes, RequestHeaders],
        buffer: bytearray,
        longest: int,
    ) -> None:
        compiled = native()
        self._scan = None if compiled is None else compiled.scan_calls
        self._state = state
        self._payload = payload
        self._sender = sender
        self._known = known
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._longest = longest

    def take(self, position: int, end: int) -> int:
        """Take the whole calls from ``position`` on; return where what is left begins.

        Raises
        ------
        ConnectionFault
            There were too many window updates, or they overflow.
        """
        if self._scan is None:
            return position
        calls, stop, credit, updates = self._scan(
            self._buffer, position, end, self._known, self._longest
        )
        for stream_id, headers, stream_credit, connection_credit, count, at, behind in calls:
            if not self._open(stream_id, headers, stream_credit, behind - at - HEADER_BYTES):
                return position
            self._account(connection_credit, count)
            self._state.handler.on_headers(stream_id, headers, False)
            view = self._view[at + HEADER_BYTES : behind]
            if self._state.closed or not self._payload.whole(stream_id, END_STREAM, view):
                return at
            position = behind
        self._account(credit, updates)
        return stop

    def _open(self, stream_id: int, headers: RequestHeaders, credit: int, size: int) -> bool:
        """Open a stream, if nothing about it is unusual."""
        state = self._state
        limits = state.limits
        window = state.peer.initial_window + credit
        if (
            stream_id <= state.highest_id
            or not stream_id & 1
            or state.refusing
            or state.closed
            or len(state.streams) >= limits.max_concurrent_streams
            or headers.content_length is not None
            or size > limits.stream_window
            or window > MAX_WINDOW
        ):
            return False
        state.highest_id = state.last_stream_id = stream_id
        state.streams[stream_id] = Stream(stream_id, limits.stream_window, window)
        return True

    def _account(self, credit: int, updates: int) -> None:
        if updates:
            self._state.spend_idle_frame(updates)
            if credit:
                self._sender.widen(credit)
