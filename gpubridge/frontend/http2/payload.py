"""DATA frames: payload to its consumer or into its place, and the windows it comes through."""

from __future__ import annotations

from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.flow import MAX_WINDOW, credit_due
from gpubridge.frontend.http2.frames import END_STREAM, PADDED, window_update_frame
from gpubridge.frontend.http2.sending import Sender
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.streams import Stream

__all__ = ["LARGE_FRAME_BYTES", "PayloadReceiver"]

# Less than this is received into the buffer even if it has a target: what comes behind it then
# comes in the same read.
_DIRECT_BYTES = 1 << 12
#: A frame as large is worth a read of its header alone, so that nothing of it is copied.
LARGE_FRAME_BYTES = 1 << 16
_EMPTY = memoryview(b"")


class PayloadReceiver:
    """Takes DATA frames, whole or in pieces.

    Parameters
    ----------
    state : ConnectionState
        Whose streams they are for.
    sender : Sender
        Sends WINDOW_UPDATE frames.
    """

    def __init__(self, state: ConnectionState, sender: Sender) -> None:
        self._state = state
        self._streams = state.streams
        self._sender = sender
        self._handler = state.handler
        self._stream_window = state.limits.stream_window
        self._full = state.limits.connection_window
        #: What the peer may still send on the connection.
        self.window = self._full
        #: The frame that we are in: payload and padding to come.
        self.left = self.padding = 0
        # Whose it is (None: nobody's), and whether it ends the stream.
        self._stream: Stream | None = None
        self._ends = False
        # The payload of the frame that came last, and whose target took the end of it.
        self._size = 0
        self._finished: Stream | None = None

    # -- frames ---------------------------------------------------------------------------------

    def whole(self, stream_id: int, flags: int, view: memoryview) -> bool:
        """Take a frame that has nothing unusual; return False, and do nothing, for any other."""
        stream = self._streams.get(stream_id)
        length = len(view)
        if (
            stream is None
            or not stream.plain
            or flags & PADDED
            or not 0 < length <= self.window
            or length > stream.window
        ):
            return False
        ends = flags & END_STREAM == END_STREAM
        if ends:
            stream.ended = True
            stream.plain = False
        self._account(stream, length)
        self._handler.on_data(stream_id, view, ends)
        return True

    def skip(self, length: int, padding: int = 0) -> None:
        """Be in a frame whose payload is nobody's."""
        self.left = length
        self.padding = padding
        self._ends = False
        self._stream = None

    def begin(self, flags: int, stream_id: int, length: int, padding: int) -> None:
        """Be in a DATA frame.

        Parameters
        ----------
        flags, stream_id, length : int
            What the frame's header says.
        padding : int
            The padding's length byte, 0 if it has none.

        Raises
        ------
        ConnectionFault, StreamFault
            What is wrong with it; after a StreamFault its payload is skipped.
        """
        size = length - 1 - padding if flags & PADDED else length
        self._check_connection(stream_id, length, size)
        self.skip(size, padding)
        self.window -= length
        self._replenish_connection()
        ends = flags & END_STREAM == END_STREAM
        if not size and not ends:
            self._state.spend_idle_frame()
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_closed(stream_id)
            return
        self._check_stream(stream, length, size, ends)
        stream.window -= length
        if stream.holding:
            stream.held += size
        if ends:
            stream.ended = True
            stream.plain = False
        # Not if the windows let all of a target come: to its peer an update is a packet to be read.
        if stream.target is None or len(stream.target) > stream.window + size:
            self._replenish(stream)
        self._stream = stream
        self._ends = ends
        self._size = length
        self._finished = None
        if not size and ends:
            self._end_empty(stream)

    def take(self, view: memoryview) -> int:
        """Take what came of the frame that we are in; return how many bytes that were."""
        used = 0
        while self.left and used < len(view):
            size = min(self.left, len(view) - used)
            stream = self._stream
            if stream is None or stream.gone:
                self.left -= size
            elif stream.target is None:
                self.left -= size
                self._handler.on_data(
                    stream.stream_id, view[used : used + size], self._ends and not self.left
                )
            else:
                size = min(size, len(stream.target))
                self.left -= size
                stream.target[:size] = view[used : used + size]
                stream.copied += size
                self._fill(stream, size)
            used += size
        if not self.left:
            self._stream = None
            size = min(self.padding, len(view) - used)
            self.padding -= size
            used += size
        return used

    # -- targets --------------------------------------------------------------------------------

    def target(self) -> memoryview | None:
        """Return where the socket is to receive the payload, if that is worth a read of its own."""
        stream = self._stream
        if stream is None or stream.target is None:
            return None
        target = stream.target[: self.left]
        return target if len(target) >= _DIRECT_BYTES else None

    def received(self, nbytes: int) -> None:
        """Take bytes that were received where `target` said."""
        self.left -= nbytes
        stream = self._stream
        if stream is not None and not stream.gone:
            self._fill(stream, nbytes)
        if not self.left:
            self._stream = None
            self._finished = stream

    def recent(self) -> tuple[Stream | None, int]:
        """Return whose target takes this frame, or took the end of the last, and that frame's length."""
        if not (self.left or self.padding):
            return self._finished, self._size
        if self.padding or self._ends:
            return None, 0
        return self._stream, self._size

    @property
    def awaits_large(self) -> bool:
        """Whether another large frame for the same target can be expected."""
        stream = self._finished
        return (
            stream is not None
            and self._size >= LARGE_FRAME_BYTES
            and stream.target is not None
            and len(stream.target) >= _DIRECT_BYTES
        )

    def room(self, stream: Stream) -> int:
        """Return how many bytes a stream may still bring: by the windows, and by its content-length."""
        room = min(self.window, stream.window)
        return room if stream.expected is None else min(room, stream.expected)

    def frames(self, stream: Stream, count: int, size: int) -> None:
        """Take whole frames of equal size, received into their stream's target."""
        self.skip(0)
        self.window -= count * size
        self._replenish_connection()
        stream.window -= count * size
        if stream.expected is not None:
            stream.expected -= count * size
        if stream.target is None or len(stream.target) > stream.window + count * size:
            self._replenish(stream)
        self._fill(stream, count * size)
        self._finished = stream

    def receive_into(self, stream: Stream, target: memoryview) -> None:
        """Receive the next payload bytes of a stream into memory, and allow it to come."""
        stream.target = target
        stream.plain = False
        missing = min(len(target), MAX_WINDOW) - stream.window
        if self._stream is stream:
            missing -= self.left
        if missing > 0 and not stream.ended:
            self._grant(stream, missing)

    def _fill(self, stream: Stream, size: int) -> None:
        """Note that so many bytes of a stream's target have come."""
        target = stream.target
        assert target is not None
        if stream.holding:
            stream.held = max(0, stream.held - size)
        ends = self._ends and not self.left
        if size == len(target):
            stream.target = None
            stream.plain = not (stream.ended or stream.holding or stream.expected is not None)
            self._replenish(stream)
            self._handler.on_filled(stream.stream_id, ends)
        elif ends:
            self._end_empty(stream)
        else:
            stream.target = target[size:]

    def _end_empty(self, stream: Stream) -> None:
        """Tell of an end that comes without bytes, or before the target is full."""
        stream.target = None
        self._stream = None
        self._handler.on_data(stream.stream_id, _EMPTY, True)

    # -- what may be wrong ----------------------------------------------------------------------

    def _check_connection(self, stream_id: int, length: int, size: int) -> None:
        """Check a frame's header against the connection."""
        if not stream_id:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR, "DATA: expected a stream, got the connection"
            )
        if size < 0:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"DATA: expected padding within its {length} bytes, got {length - 1 - size}",
            )
        if length > self.window:
            raise ConnectionFault(
                Http2ErrorCode.FLOW_CONTROL_ERROR,
                f"DATA: expected at most {self.window} bytes on the connection, got {length}",
            )

    def _check_closed(self, stream_id: int) -> None:
        """Forgive DATA of a stream that we have just reset, no other without a stream."""
        if stream_id not in self._state.forgiven:
            closed = stream_id & 1 and stream_id <= self._state.highest_id
            raise ConnectionFault(
                Http2ErrorCode.STREAM_CLOSED if closed else Http2ErrorCode.PROTOCOL_ERROR,
                f"DATA: expected an open stream, got {stream_id}, which is "
                f"{'closed' if closed else 'idle'}",
            )

    def _check_stream(self, stream: Stream, length: int, size: int, ends: bool) -> None:
        """Check a frame's header against its stream's state, window and content-length."""
        if stream.ended:
            raise StreamFault(
                stream.stream_id, Http2ErrorCode.STREAM_CLOSED, "DATA: expected none after the end"
            )
        if length > stream.window:
            raise StreamFault(
                stream.stream_id,
                Http2ErrorCode.FLOW_CONTROL_ERROR,
                f"DATA: expected at most {stream.window} bytes on the stream, got {length}",
            )
        if stream.expected is not None:
            stream.expected -= size
            if stream.expected < 0 or (ends and stream.expected):
                raise StreamFault(
                    stream.stream_id,
                    Http2ErrorCode.PROTOCOL_ERROR,
                    f"content-length: expected {stream.expected + size} more bytes, got {size}",
                )

    # -- windows --------------------------------------------------------------------------------

    def hold(self, stream: Stream) -> None:
        """Give back credit only for what is consumed from now on."""
        stream.holding = True
        stream.plain = False

    def consume(self, stream: Stream, nbytes: int) -> None:
        """Give back credit for bytes that came while holding."""
        stream.held = max(0, stream.held - nbytes)
        self._replenish(stream)

    def _account(self, stream: Stream, length: int) -> None:
        """Take a frame's length off both windows, and widen those that are half used up."""
        self.window -= length
        if 2 * self.window <= self._full:
            self._replenish_connection()
        stream.window -= length
        if 2 * stream.window <= self._stream_window:
            self._replenish(stream)

    def _replenish_connection(self) -> None:
        # At once, whoever holds: a slow stream must not stop its neighbours.
        due = credit_due(self._full, self.window)
        if due:
            self.window += due
            self._sender.answer(window_update_frame(0, due))

    def _replenish(self, stream: Stream) -> None:
        due = credit_due(self._stream_window, stream.window, stream.held)
        if due and not stream.ended:
            self._grant(stream, due)

    def _grant(self, stream: Stream, credit: int) -> None:
        stream.window += credit
        self._sender.control(window_update_frame(stream.stream_id, credit))
