"""A body that comes in many small DATA frames, received into its place by one scattered read.

Many clients never send frames of more than 16 KiB. Reading each by itself costs a system call and a
turn of the loop per frame; reading many at once into a buffer costs a copy. So the layout of what
comes next is foretold from the frame before, and the socket's owner reads into all of it at once
(``readv``)::

    socket:   [ header | payload | header | payload | header | rest ...
                   │        │        │        │
    memory:   headers[0]  target  headers[1]  target+L ...

If the headers turn out to be the foretold ones, the payload lies where it belongs. What begins with
any other header has to go the usual way, and is copied.
"""

from __future__ import annotations

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
        view = memoryview(self._headers)
        self._header_views = [
            view[start : start + HEADER_BYTES] for start in range(0, len(view), HEADER_BYTES)
        ]
        # Grows while the foretold comes true: where streams take turns it never does.
        self._frames = _FIRST_FRAMES
        self._stream: Stream | None = None
        self._size = 0
        self._memory: list[memoryview] = []

    def memory(self) -> list[memoryview]:
        """Return where the next bytes of the socket are to be received; empty if nowhere special.

        Something special is there right after a frame was received into its target, and if more of
        the same size fit. `received` must follow before anything else is received.
        """
        payload = self._payload
        stream, size = payload.finished()
        if stream is None or not _WORTHWHILE_BYTES <= size < LARGE_FRAME_BYTES:
            return []
        target = stream.target
        if target is None or stream.holding:
            return []
        self._stream, self._size = stream, size
        whole = min(len(target) // size, self._frames, payload.room(stream) // size)
        headers = self._header_views
        memory: list[memoryview] = []
        end = 0
        for index in range(whole):
            end += size
            memory.append(headers[index])
            memory.append(target[end - size : end])
        rest = target[end : end + size]
        if whole < self._frames and len(rest) >= _WORTHWHILE_BYTES:
            memory += headers[whole], rest
        self._memory = memory
        return memory

    def received(self, nbytes: int) -> memoryview:
        """Take bytes that were received where `memory` said.

        Returns
        -------
        memoryview
            A copy of those that are to be received in the usual way.
        """
        stream, size, memory = self._stream, self._size, self._memory
        self._stream, self._memory = None, []
        assert stream is not None
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
        place = memory[2 * right + 1 :][:1]
        if place and 0 < begun <= len(place[0]) and self._begins(stream, right, begun):
            self._payload.received(begun)
            return _NOTHING
        stream.copied += left
        return memoryview(b"".join(memory[2 * right :]))[:left] if left else _NOTHING

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
