"""What comes in: bytes from the socket to frames, DATA to its consumer or straight to its place.

The socket's owner asks `memory` where to receive, receives, and tells `received` how much came.
Between frames that is the buffer here. Within a DATA frame of a stream that has a target
(`receive_into`), once the buffer is used up, it is the target itself: the kernel writes the payload
where it belongs.

::

    buffer:  [ used | frame | frame | first part of DATA ]  then  target: [ ....rest of DATA.... ]
                    ^_position                           ^_end
"""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode
from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADER_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FIELDS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameType,
    unpack_header,
)
from gpubridge.frontend.http2.opening import HeaderReceiver
from gpubridge.frontend.http2.payload import PayloadReceiver
from gpubridge.frontend.http2.scattering import ScatteredFrames
from gpubridge.frontend.http2.sending import Sender
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.whole_calls import WholeCalls

__all__ = ["Receiver"]

_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_UNUSUAL_HEADERS = PADDED | PRIORITY_FIELDS


class Receiver:
    """The receiving half of a connection.

    Parameters
    ----------
    state : ConnectionState
        Shared with the sending half.
    payload : PayloadReceiver
        Takes DATA.
    sender : Sender
        The sending half.
    on_control : callable
        Takes frames that are neither DATA nor HEADERS: type, flags, stream id and payload.
    """

    def __init__(
        self,
        state: ConnectionState,
        payload: PayloadReceiver,
        sender: Sender,
        on_control: Callable[[int, int, int, bytes], None],
    ) -> None:
        limits = state.limits
        self._state = state
        self._payload = payload
        self._on_control = on_control
        self._opening = HeaderReceiver(state)
        self._buffer = bytearray(limits.receive_bytes)
        self._view = memoryview(self._buffer)
        self._position = self._end = 0
        self._starting = True
        # Frames larger than this are looked at closely.
        self._usual = min(limits.max_frame_size, limits.header_block_bytes)
        self._calls = WholeCalls(
            state, payload, sender, self._opening.known, self._buffer, self._usual
        )
        self._scattered = ScatteredFrames(payload, limits.max_frame_size)
        # `memory` has handed out a target.
        self._lent = False

    @property
    def started(self) -> bool:
        """Whether the preface is there, and the header of the first SETTINGS."""
        return not self._starting

    def memory(self) -> memoryview:
        """Return where the next bytes are to be received."""
        if not self._end:
            target = self._payload.target()
            if target is not None:
                self._lent = True
                return target
            return self._view[:HEADER_BYTES] if self._payload.awaits_large else self._view
        return self._view[self._end :]

    def received(self, nbytes: int) -> None:
        """Take bytes that were received where `memory` said.

        Raises
        ------
        StreamFault, ConnectionFault
            What is wrong; after a StreamFault call again with 0 bytes.
        """
        if self._lent:
            self._lent = False
            self._payload.received(nbytes)
            return
        self._end += nbytes
        self._parse()

    def scatter(self) -> FrameVector | None:
        """Return where several frames can be received at once, instead of `memory`; None if not."""
        return None if self._end or self._state.closed else self._scattered.memory()

    def scattered(self, nbytes: int) -> memoryview:
        """Take bytes that were received where `scatter` said; return a copy of those to receive again.

        Raises
        ------
        ConnectionFault
            The peer does not read our answers.
        """
        return self._scattered.received(nbytes)

    def settle(self) -> None:
        """Make room behind what is not used yet."""
        rest = self._end - self._position
        if self._state.closed:
            rest = 0
        elif rest and self._position:
            self._view[:rest] = bytes(self._view[self._position : self._end])
        self._position = 0
        self._end = rest

    def _parse(self) -> None:
        """Take all frames that the buffer has."""
        buffer, view, end = self._buffer, self._view, self._end
        payload = self._payload
        if self._starting and not self._start():
            return
        while not self._state.closed:
            if payload.left or payload.padding:
                self._position += payload.take(view[self._position : end])
                if payload.left or payload.padding:
                    return
            position = self._position
            begin = position + HEADER_BYTES
            if begin > end:
                return
            word, flags, stream_id = unpack_header(buffer, position)
            kind, length = word & 0xFF, word >> 8
            stop = begin + length
            # Usual frames that are all there; `_unusual` takes any.
            if (
                stop <= end
                and length <= self._usual
                and not self._opening.unfinished
                and self._take_usual(kind, flags, stream_id, begin, stop)
            ):
                continue
            if not self._unusual(kind, flags, stream_id & MAX_STREAM_ID, length):
                return

    def _take_usual(self, kind: int, flags: int, stream_id: int, begin: int, stop: int) -> bool:
        """Take a frame that is there as a whole, or a call; return False for one that is unusual."""
        position = self._position
        if kind == HEADERS:
            self._position = self._calls.take(position, self._end)
            if self._position != position:
                return True
        self._position = stop
        view = self._view[begin:stop]
        if kind == DATA and self._payload.whole(stream_id, flags, view):
            return True
        if kind == HEADERS and flags & END_HEADERS and not flags & _UNUSUAL_HEADERS:
            self._opening.whole(stream_id & MAX_STREAM_ID, flags, bytes(view))
            return True
        if kind == WINDOW_UPDATE and stop - begin == _SIZES[WINDOW_UPDATE]:
            self._on_control(kind, flags, stream_id & MAX_STREAM_ID, bytes(view))
            return True
        self._position = position
        return False

    def _start(self) -> bool:
        """Check the connection's first bytes; return whether they are all there."""
        got = bytes(self._view[: min(self._end, len(PREFACE))])
        if not PREFACE.startswith(got):
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"expected the client preface of HTTP/2, got {got!r}: is this an HTTP/1 client?",
            )
        if self._end < len(PREFACE) + HEADER_BYTES:
            return False
        word, flags, _ = unpack_header(self._buffer, len(PREFACE))
        if word & 0xFF != SETTINGS or flags & ACK:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"expected SETTINGS as the first frame, got type {word & 0xFF}, flags {flags}",
            )
        self._position = len(PREFACE)
        self._starting = False
        return True

    def _unusual(self, kind: int, flags: int, stream_id: int, length: int) -> bool:
        """Take a frame of any form; return whether enough of it is there."""
        self._check_frame(kind, stream_id, length)
        begin = self._position + HEADER_BYTES
        stop = begin + length
        if kind == DATA:
            padding = 0
            if flags & PADDED and length:
                if begin >= self._end:
                    return False
                padding = self._buffer[begin]
                begin += 1
            self._position = begin
            self._payload.begin(flags, stream_id, length, padding)
            return True
        if kind > CONTINUATION:
            # Unknown types are ignored, whatever their size.
            self._position = begin
            self._payload.skip(length)
            self._state.spend_idle_frame()
            return True
        if stop > self._end:
            return False
        self._position = stop
        payload = bytes(self._view[begin:stop])
        if kind == HEADERS:
            self._opening.begin(flags, stream_id, payload)
        elif kind == CONTINUATION:
            self._opening.proceed(flags, stream_id, payload)
        else:
            self._on_control(kind, flags, stream_id, payload)
        return True

    def _check_frame(self, kind: int, stream_id: int, length: int) -> None:
        """Check what a frame's header says before its payload is there."""
        limits = self._state.limits
        unfinished = self._opening.unfinished
        if unfinished and (kind != CONTINUATION or stream_id != unfinished):
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"expected CONTINUATION of stream {unfinished}, got type {kind} of stream "
                f"{stream_id}",
            )
        if length > limits.max_frame_size:
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR,
                f"frame: expected at most {limits.max_frame_size} bytes, got {length}",
            )
        if kind == DATA or kind > CONTINUATION:
            return
        if kind in _SIZES and length != _SIZES[kind]:
            name = FrameType(kind).name
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR,
                f"{name}: expected {_SIZES[kind]} bytes, got {length}",
            )
        most = limits.header_block_bytes
        if length > most and kind in (HEADERS, CONTINUATION, SETTINGS, GOAWAY):
            name = FrameType(kind).name
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"{name}: expected at most {most} bytes, got {length}",
            )
