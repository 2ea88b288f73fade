"""What a stream has queued, framed: headers of ours between views of the callers' buffers."""

from __future__ import annotations

from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.frames import END_STREAM, pack_header
from gpubridge.frontend.http2.streams import Stream

__all__ = ["frame_data"]


def frame_data(
    out: list[bytes | memoryview | FrameVector], stream: Stream, size: int, most: int
) -> int:
    """Append DATA frames with the first ``size`` bytes of a stream's queue.

    Parameters
    ----------
    out : list of bytes, memoryview or FrameVector
        Gets the frames.
    stream : Stream
        Has at least as much queued; what is framed is queued no more.
    size : int
        Bytes, at least one.
    most : int
        Bytes that a frame may have: what the peer's SETTINGS_MAX_FRAME_SIZE says.

    Returns
    -------
    int
        The number of frames.
    """
    frames = 1
    while size > most:
        count = _equal_frames(out, stream, size, most)
        if not count:
            count = 1
            _frame(out, stream, most)
        size -= count * most
        frames += count
    _frame(out, stream, size)
    return frames


def _equal_frames(
    out: list[bytes | memoryview | FrameVector], stream: Stream, size: int, most: int
) -> int:
    """Frame what lies in one buffer, with something left behind it; return the number of frames."""
    queue = stream.queue
    assert queue is not None
    view = queue[0]
    count = (min(size, len(view)) - 1) // most
    if not count:
        return 0
    end = count * most
    headers = pack_header(most << 8, 0, stream.stream_id) * count
    out.append(FrameVector(headers, view[:end], most))
    queue[0] = view[end:]
    stream.queued -= end
    return count


def _frame(out: list[bytes | memoryview | FrameVector], stream: Stream, size: int) -> None:
    """Make one frame, of as many buffers as it takes."""
    queue = stream.queue
    assert queue is not None
    stream.queued -= size
    ends = stream.closing and not stream.queued and stream.trailers is None
    out.append(pack_header(size << 8, END_STREAM if ends else 0, stream.stream_id))
    while size:
        view = queue[0]
        if len(view) > size:
            out.append(view[:size])
            queue[0] = view[size:]
            return
        out.append(view)
        size -= len(view)
        queue.popleft()
