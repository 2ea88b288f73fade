"""What goes out: frames in their order, DATA as the peer's windows allow, streams in turn.

A response that is small and that the windows let through is framed at once, and all such frames
made since the last look become one ``bytes``. Other DATA waits with its stream, as the caller's own
buffers, and is framed when the socket's owner asks for output::

    send_data ──small, windows open, nobody waits──────────────► out ──take_output──► socket
        └──► the stream's queue ──► round (streams with window) ──┘
                     ▲  WINDOW_UPDATE ──┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from gpubridge.errors import InternalError
from gpubridge.frontend.http2.compression import EMPTY_TABLE, encode_headers
from gpubridge.frontend.http2.data_frames import frame_data
from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.flow import DEFAULT_WINDOW, MAX_WINDOW
from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    pack_header,
    rst_stream_frame,
)
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.streams import Stream

__all__ = ["Sender"]

# Every peer takes frames of this size; copying as much costs less than a write of its own.
_SMALL = 1 << 14
# Of what is handed out, smaller pieces are joined.
_JOINED = 1 << 12
_DEFAULT_TABLE = 4096


class Sender:
    """The sending half of a connection.

    Parameters
    ----------
    state : ConnectionState
        Shared with the receiving half.
    on_idle : callable
        Called when the last stream is closed after no more are accepted.
    """

    def __init__(self, state: ConnectionState, on_idle: Callable[[], None]) -> None:
        self._state = state
        self._streams = state.streams
        self._on_idle = on_idle
        self._out: list[bytes | memoryview | FrameVector] = []
        # Something in _out is too large to be joined.
        self._large = False
        self._window = DEFAULT_WINDOW
        self._round: deque[Stream] = deque()
        self._control = 0
        # Stands before the next header block.
        self._table_update = b""
        self._table_size = _DEFAULT_TABLE

    # -- responses ------------------------------------------------------------------------------

    def headers(
        self, stream_id: int, headers: bytes | Iterable[tuple[bytes, bytes]], end: bool
    ) -> None:
        """Send headers, or trailers after everything that is queued."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        block = headers if isinstance(headers, bytes) else encode_headers(headers)
        if stream.queued:
            if stream.closing or not end:
                raise InternalError(
                    f"stream {stream_id}: expected trailers that end it behind its data, got "
                    "headers"
                )
            stream.trailers = block
            stream.closing = True
            return
        if self._table_update or len(block) > _SMALL:
            self._large_headers(stream_id, block, end)
        else:
            flags = END_HEADERS | END_STREAM if end else END_HEADERS
            out = self._out
            out.append(pack_header(len(block) << 8 | HEADERS, flags, stream_id))
            out.append(block)
        if end:
            self._ended(stream)

    def data(self, stream_id: int, buffers: Sequence[bytes | memoryview], end: bool) -> None:
        """Send body bytes, or queue them behind a window."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = 0
        for buffer in buffers:
            size += len(buffer)
        if (
            not 0 < size <= _SMALL
            or size > self._window
            or size > stream.send_window
            or self._round
        ):
            self._queue(stream, buffers, size, end)
            return
        self._window -= size
        stream.send_window -= size
        self._state.data_frames += 1
        out = self._out
        out.append(pack_header(size << 8, END_STREAM if end else 0, stream_id))
        out.extend(buffers)
        if end:
            self._ended(stream)

    def response(
        self, stream_id: int, opening: bytes, body: Sequence[bytes | memoryview], trailers: bytes
    ) -> None:
        """Send all of a response: headers, body and trailers."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = len(body[0]) if len(body) == 1 else 0
        if (
            not 0 < size <= _SMALL
            or size > self._window
            or size > stream.send_window
            or self._round
            or self._table_update
            or stream.queued
            or len(opening) + len(trailers) > _SMALL
        ):
            self.headers(stream_id, opening, False)
            self.data(stream_id, body, False)
            self.headers(stream_id, trailers, True)
            return
        self._window -= size
        self._state.data_frames += 1
        self._out += (
            pack_header(len(opening) << 8 | HEADERS, END_HEADERS, stream_id),
            opening,
            pack_header(size << 8, 0, stream_id),
            body[0],
            pack_header(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id),
            trailers,
        )
        self._ended(stream)

    def reset(self, stream_id: int, code: int) -> Stream | None:
        """Close a stream with RST_STREAM; return it if it was open."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.leave()
        self.control(rst_stream_frame(stream_id, code))
        self._state.forgiven.add(stream_id)
        self._closed_one()
        return stream

    def forget(self, stream: Stream) -> None:
        """Close a stream that the peer has reset."""
        del self._streams[stream.stream_id]
        stream.leave()
        self._closed_one()

    def _large_headers(self, stream_id: int, block: bytes, end: bool) -> None:
        """Send a header block that may need several frames."""
        block = self._table_update + block
        self._table_update = b""
        kind, flags = HEADERS, END_STREAM if end else 0
        for start in range(0, len(block), _SMALL):
            if start + _SMALL >= len(block):
                flags |= END_HEADERS
            self._out.append(frame(kind, flags, stream_id, block[start : start + _SMALL]))
            kind, flags = CONTINUATION, 0

    def _ended(self, stream: Stream) -> None:
        """Our END_STREAM is out: the stream is closed."""
        self._state.completed += 1
        stream_id = stream.stream_id
        del self._streams[stream_id]
        stream.leave()
        if not stream.ended:
            # The rest of the request is of no use any more.
            self.control(rst_stream_frame(stream_id, Http2ErrorCode.NO_ERROR))
            self._state.forgiven.add(stream_id)
        self._closed_one()

    def _closed_one(self) -> None:
        if self._state.refusing and not self._streams:
            self._on_idle()

    # -- control frames -------------------------------------------------------------------------

    def control(self, whole: bytes) -> None:
        """Send a frame that is no part of a response."""
        self._out.append(whole)
        self._control += 1

    def answer(self, whole: bytes) -> None:
        """Send a control frame that the peer has made us send.

        Raises
        ------
        ConnectionFault
            The peer asks for answers and does not read them.
        """
        self.control(whole)
        limit = self._state.limits.unsent_control_frames
        if self._control > limit:
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"expected the peer to read its answers, got {limit} unread",
            )

    # -- flow control ---------------------------------------------------------------------------

    def widen(self, increment: int) -> None:
        """Widen the connection's window by a WINDOW_UPDATE.

        Raises
        ------
        ConnectionFault
            It overflows.
        """
        self._window += increment
        if self._window > MAX_WINDOW:
            raise ConnectionFault(
                Http2ErrorCode.FLOW_CONTROL_ERROR,
                f"WINDOW_UPDATE: expected a window of at most 2^31-1, got {self._window}",
            )

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """Widen a stream's window by a WINDOW_UPDATE.

        Raises
        ------
        StreamFault
            It overflows.
        """
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamFault(
                stream.stream_id,
                Http2ErrorCode.FLOW_CONTROL_ERROR,
                f"WINDOW_UPDATE: expected a window of at most 2^31-1, got {stream.send_window}",
            )
        self._join_round(stream)

    def change_initial_window(self, delta: int) -> None:
        """Change the windows of all streams by what SETTINGS changed the initial one.

        Raises
        ------
        ConnectionFault
            One overflows.
        """
        for stream in self._streams.values():
            stream.send_window += delta
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(
                    Http2ErrorCode.FLOW_CONTROL_ERROR,
                    f"SETTINGS: INITIAL_WINDOW_SIZE: expected stream {stream.stream_id} to have a "
                    f"window of at most 2^31-1, got {stream.send_window}",
                )
            self._join_round(stream)

    def limit_table(self, size: int) -> None:
        """Allow the peer a smaller header table; ours is empty anyway, which has to be said."""
        if size < self._table_size:
            self._table_size = 0
            self._table_update = EMPTY_TABLE

    # -- output ---------------------------------------------------------------------------------

    def take(self) -> list[bytes | memoryview | FrameVector]:
        """Return what is to be sent now; nothing when nothing is, or may be, sent."""
        if self._round:
            self._share()
        out = self._out
        if not out:
            return out
        self._out = []
        self._control = 0
        if not self._large:
            return [b"".join(cast("list[bytes | memoryview]", out))]
        self._large = False
        parts: list[bytes | memoryview | FrameVector] = []
        small: list[bytes | memoryview] = []
        for piece in out:
            if not isinstance(piece, FrameVector) and len(piece) <= _JOINED:
                small.append(piece)
                continue
            if small:
                parts.append(b"".join(small))
                small = []
            parts.append(piece)
        if small:
            parts.append(b"".join(small))
        return parts

    def close(self) -> None:
        """Drop all streams and what they have queued; what is framed stays."""
        for stream in self._streams.values():
            stream.leave()
        self._streams.clear()
        self._round.clear()

    def _queue(
        self, stream: Stream, buffers: Sequence[bytes | memoryview], size: int, end: bool
    ) -> None:
        """Keep buffers until the windows and the other streams let them through."""
        if stream.closing:
            raise InternalError(f"stream {stream.stream_id}: expected no data after its end")
        if not stream.queued and not size:
            if end:
                self._out.append(frame(DATA, END_STREAM, stream.stream_id))
                self._ended(stream)
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.extend(memoryview(buffer) for buffer in buffers if len(buffer))
        stream.queued += size
        stream.closing = end
        self._join_round(stream)

    def _join_round(self, stream: Stream) -> None:
        if stream.queued and stream.send_window > 0 and not stream.in_round:
            stream.in_round = True
            self._round.append(stream)

    def _share(self) -> None:
        """Frame queued DATA, each stream in its turn, up to what one look may hand out."""
        limits = self._state.limits
        left = limits.output_bytes
        waiting = self._round
        while waiting and left > 0 and self._window > 0:
            stream = waiting.popleft()
            stream.in_round = False
            size = min(
                stream.queued,
                stream.send_window,
                self._window,
                limits.quantum_bytes if waiting else left,
            )
            if size <= 0:
                continue  # it was closed, or its window was, while it waited
            left -= size
            self._window -= size
            stream.send_window -= size
            stream.unqueued += size
            self._state.data_frames += frame_data(
                self._out, stream, size, self._state.peer.max_frame_size
            )
            self._large = True
            if stream.queued:
                self._join_round(stream)
            elif stream.closing:
                if stream.trailers is not None:
                    self._large_headers(stream.stream_id, stream.trailers, end=True)
                self._ended(stream)
            else:
                self._state.handler.on_writable(stream.stream_id)
