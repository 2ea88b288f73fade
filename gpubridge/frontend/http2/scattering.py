"""A body that comes in many small DATA frames, received into its place by one scattered read.

Many clients never send frames of more than 16 KiB. Reading each by itself costs a system call and a
turn of the loop per frame; reading many at once into a buffer costs a copy. So the layout of what
comes next is foretold from the frame before, and the socket's owner reads into all of it at once
(``readv``)::

    socket:   [ lead | header | payload | header | payload | header | rest ...
                 │        │        │        │
    memory:   target  headers[0] +lead   headers[1] +lead+size ...

If the headers turn out to be the foretold ones, the payload lies where it belongs. What begins with
any other header has to go the usual way, and is copied.
"""

from __future__ import annotations

from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.frames import (
    DATA,
    END_STREAM,
    HEADER_BYTES,
    MAX_STREAM_ID,
    pack_header,
    unpack_header,
)
from gpubridge.frontend.http2.payload import LARGE_FRAME_BYTES, PayloadReceiver
from gpubridge.frontend.http2.streams import Stream

__all__ = ["ScatteredFrames"]

_MOST_FRAMES = 64
_FIRST_FRAMES = 2
# Shorter frames are cheaper to receive through the buffer, many in a read.
_WORTHWHILE_BYTES = 1 << 12
_NOTHING = memoryview(b"")


class ScatteredFrames:
    """Foretells frames, and takes what came in their places.

    Parameters
    ----------
    payload : PayloadReceiver
        Takes the DATA.
    largest : int
        Bytes that a frame may have.
    """

    def __init__(self, payload: PayloadReceiver, largest: int) -> None:
        self._payload = payload
        self._largest = largest
        self._headers = bytearray(HEADER_BYTES * (_MOST_FRAMES + 1))
        self._header_view = memoryview(self._headers)
        # Grows while the foretold comes true: where streams take turns it never does.
        self._frames = _FIRST_FRAMES
        self._stream: Stream | None = None
        self._vector: FrameVector | None = None

    def memory(self) -> FrameVector | None:
        """Return where the next bytes of the socket are to be received; None if nowhere special.

        Something special is there within a frame that is received into its target, and right after
        one, if more of the same size fit. `received` must follow before anything else is received.
        """
        payload = self._payload
        stream, size = payload.recent()
        if stream is None or not _WORTHWHILE_BYTES <= size < LARGE_FRAME_BYTES:
            return None
        target = stream.target
        lead = payload.left
        if target is None or stream.holding or lead >= len(target):
            return None
        room = len(target) - lead
        whole = min(room // size, self._frames, payload.room(stream) // size)
        end = lead + whole * size
        rest = min(size, len(target) - end)
        if whole < self._frames and rest >= _WORTHWHILE_BYTES:
            end += rest
        if end == lead:
            return None
        self._stream = stream
        self._vector = FrameVector(self._header_view, target[:end], size, lead)
        return self._vector

    def received(self, nbytes: int) -> memoryview:
        """Take bytes that were received where `memory` said.

        Returns
        -------
        memoryview
            A copy of those that are to be received in the usual way.
        """
        stream, vector = self._stream, self._vector
        self._stream = self._vector = None
        assert stream is not None
        assert vector is not None
        _, place, size, lead = vector
        if lead:
            taken = min(lead, nbytes)
            self._payload.received(taken)
            nbytes -= taken
        step = HEADER_BYTES + size
        wanted = pack_header(size << 8 | DATA, 0, stream.stream_id)
        came = nbytes // step
        right = self._count(wanted, came)
        if right < came:
            self._frames = max(1, self._frames // 2)
        elif came == self._frames:
            self._frames = min(2 * came, _MOST_FRAMES)
        left = nbytes - right * step
        if right:
            self._payload.frames(stream, right, size)
        begun = left - HEADER_BYTES
        if 0 < begun <= min(size, len(place) - lead - right * size) and self._begins(
            stream, right, begun
        ):
            self._payload.received(begun)
            return _NOTHING
        if not left:
            return _NOTHING
        stream.copied += left
        return self._rest(vector, right, left)

    def _rest(self, vector: FrameVector, frames: int, nbytes: int) -> memoryview:
        """Return a copy of what came behind so many frames, as it was on the wire."""
        headers, payload, size, lead = vector
        rest = FrameVector(headers[frames * HEADER_BYTES :], payload[lead + frames * size :], size)
        return memoryview(bytes(rest))[:nbytes]

    def _count(self, wanted: bytes, came: int) -> int:
        """Return how many of the frames that came have the wanted header, up to the first other one."""
        headers = self._headers
        if headers[: HEADER_BYTES * came] == wanted * came:
            return came
        right = 0
        while headers.startswith(wanted, HEADER_BYTES * right):
            right += 1
        return right

    def _begins(self, stream: Stream, index: int, nbytes: int) -> bool:
        """Be in the frame of a header if it is DATA of the stream with as much payload, and usual."""
        word, flags, stream_id = unpack_header(self._headers, HEADER_BYTES * index)
        kind, length = word & 0xFF, word >> 8
        if (
            kind != DATA
            or stream_id & MAX_STREAM_ID != stream.stream_id
            or flags & ~END_STREAM
            or stream.target is None
            or stream.ended
            or not nbytes <= length <= min(self._largest, self._payload.room(stream))
            or (flags and stream.expected not in (None, length))
        ):
            return False
        self._payload.begin(flags, stream.stream_id, length, 0)
        return True
