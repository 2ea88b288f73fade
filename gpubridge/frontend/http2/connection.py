"""One HTTP/2 connection of a server (RFC 9113), without a socket.

::

    socket ──memory, received──► Receiver ──► handler ──send_headers, send_data──► Sender
       ▲                            │ SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, GOAWAY     │
       │                            ▼                                                   │
       └──────────take_output────── (here) ◄────────────────────────────────────────────┘

The socket's owner calls `take_output` after `received`, after a handler has sent something, and
when the socket can be written again; while it cannot be written, it does not take, and does not
receive either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpubridge.frontend.http2.control import ControlFrames
from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.frames import MAX_STREAM_ID, PING, frame, goaway_frame
from gpubridge.frontend.http2.handler import StreamHandler
from gpubridge.frontend.http2.limits import Http2Limits
from gpubridge.frontend.http2.payload import PayloadReceiver
from gpubridge.frontend.http2.receiving import Receiver
from gpubridge.frontend.http2.sending import Sender
from gpubridge.frontend.http2.settings import announcement
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.streams import Stream

__all__ = ["Http2Connection"]

_DRAIN_PING = b"draining"
_NOTHING = memoryview(b"")


class Http2Connection:
    """The server's side of a connection.

    What belongs to a stream that is closed, whoever closed it, is ignored: the handler cannot know
    yet. Not for several threads.

    Parameters
    ----------
    handler : StreamHandler
        Serves the streams.
    limits : Http2Limits
        What the peer may ask.
    clock : callable
        Returns seconds that only grow (``time.monotonic``).

    Attributes
    ----------
    closed : bool
        The connection is over: send `take_output` and close the socket. Nothing is received any
        more.
    """

    def __init__(
        self, handler: StreamHandler, limits: Http2Limits, clock: Callable[[], float]
    ) -> None:
        self._handler = handler
        self._state = ConnectionState(limits, handler, clock)
        self._sender = Sender(self._state, self._finish)
        control = ControlFrames(self._state, self._sender, self._on_pong)
        self._payload = PayloadReceiver(self._state, self._sender)
        self._receiver = Receiver(self._state, self._payload, self._sender, control.take)
        self._draining = False
        self._sender.control(announcement(limits))
        # The socket's owner calls these for every read: no detour.
        self.memory: Callable[[], memoryview] = self._receiver.memory

    # -- the socket's owner ---------------------------------------------------------------------

    def received(self, nbytes: int) -> None:
        """Take ``nbytes`` that were received where ``memory()`` said; callbacks come from here."""
        receiver = self._receiver
        try:
            while True:
                try:
                    receiver.received(nbytes)
                    break
                except StreamFault as fault:
                    self._reset_faulty(fault)
                    nbytes = 0
        except ConnectionFault as fault:
            self.close(fault.code, fault.text)
        receiver.settle()

    def scatter(self) -> FrameVector | None:
        """Return memory for several frames, to be received into at once, in its order; None if not.

        Ask after `received`. If there is any, `scattered` must follow before `memory` is asked.
        """
        return self._receiver.scatter()

    def scattered(self, nbytes: int) -> None:
        """Take ``nbytes`` (0: none came) that were received where ``scatter()`` said."""
        rest = _NOTHING
        try:
            rest = self._receiver.scattered(nbytes)
        except ConnectionFault as fault:
            self.close(fault.code, fault.text)
        while rest and not self._state.closed:
            memory = self.memory()
            size = min(len(memory), len(rest))
            memory[:size] = rest[:size]
            self.received(size)
            rest = rest[size:]

    def take_output(self) -> list[bytes | memoryview | FrameVector]:
        """Return what is to be sent now, in order; empty when nothing is, or may be, sent.

        Memory of callers in it is theirs again once the socket has sent it. About
        ``output_bytes`` of queued DATA come at a time: ask again when they are on their way.
        """
        return self._sender.take()

    def lost(self) -> None:
        """The socket is gone: forget all streams and their memory; no callback comes."""
        self._state.closed = True
        self._sender.close()

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self._state.closed

    @property
    def started(self) -> bool:
        """Whether the client's preface is there, and the beginning of its settings."""
        return self._receiver.started

    @property
    def highest_stream(self) -> int:
        """The highest id of a stream that the peer has used; another object for another id."""
        return self._state.highest_id

    @property
    def frames_sent(self) -> int:
        """Grows with the DATA frames sent, and with the streams ended."""
        return self._state.data_frames + self._state.completed

    @property
    def open_streams(self) -> int:
        """How many streams are not closed."""
        return len(self._state.streams)

    # -- requests -------------------------------------------------------------------------------

    def receive_into(self, stream_id: int, target: memoryview) -> None:
        """Receive the stream's next DATA payload into ``target``; then `on_filled` comes.

        The stream may send as much at once, whatever its window was. If the request ends before
        ``target`` is full, `on_data` with ``end`` comes instead. What a running `on_data` shows is
        not copied: that is for its callee to do.

        Parameters
        ----------
        stream_id : int
            Which stream.
        target : memoryview
            Writable, of bytes ("B"), not empty; belongs to the connection until it is full or the
            stream is closed.
        """
        stream = self._state.streams.get(stream_id)
        if stream is not None:
            self._payload.receive_into(stream, target)

    def missing(self, stream_id: int) -> int:
        """Return how many bytes the target of ``receive_into`` still lacks; 0 if there is none."""
        stream = self._state.streams.get(stream_id)
        return 0 if stream is None or stream.target is None else len(stream.target)

    def copied(self, stream_id: int) -> int:
        """Return how many bytes of all targets of a stream were copied on their way."""
        stream = self._state.streams.get(stream_id)
        return 0 if stream is None else stream.copied

    def hold(self, stream_id: int) -> None:
        """Let the stream send only ``stream_window`` bytes beyond what `consume` has counted."""
        stream = self._state.streams.get(stream_id)
        if stream is not None:
            self._payload.hold(stream)

    def consume(self, stream_id: int, nbytes: int) -> None:
        """Let a stream on hold send ``nbytes`` more: as many of `on_data` have been used up."""
        stream = self._state.streams.get(stream_id)
        if stream is not None:
            self._payload.consume(stream, nbytes)

    # -- responses ------------------------------------------------------------------------------

    def send_headers(
        self,
        stream_id: int,
        headers: bytes | Iterable[tuple[bytes, bytes]],
        end: bool = False,
    ) -> None:
        """Send response headers, or with ``end`` trailers behind all data.

        Parameters
        ----------
        stream_id : int
            Which stream.
        headers : bytes or iterable of (bytes, bytes)
            A block made once by `encode_headers`, or fields (names in lower case).
        end : bool
            Nothing follows. If the request has not ended, the peer is told to stop it.

        Raises
        ------
        InternalError
            Headers that end nothing, behind queued data.
        """
        self._sender.headers(stream_id, headers, end)

    def send_data(
        self, stream_id: int, buffers: Sequence[bytes | memoryview], end: bool = False
    ) -> None:
        """Send body bytes; what the peer's windows do not allow yet is queued, not copied.

        Parameters
        ----------
        stream_id : int
            Which stream.
        buffers : sequence of bytes or memoryview
            Of bytes ("B"). They must stay as they are until the socket has sent them.
        end : bool
            Nothing follows.

        Raises
        ------
        InternalError
            The stream's end is already queued.
        """
        self._sender.data(stream_id, buffers, end)

    def send_response(
        self, stream_id: int, opening: bytes, body: Sequence[bytes | memoryview], trailers: bytes
    ) -> None:
        """Send all of a response at once; the same as headers, data and trailers in turn.

        Parameters
        ----------
        opening, trailers : bytes
            Blocks made once by `encode_headers`.
        body : sequence of bytes or memoryview
            As for `send_data`.
        """
        self._sender.response(stream_id, opening, body, trailers)

    @property
    def held_back(self) -> list[Stream]:
        """The streams with body bytes that the peer's windows do not allow, all output being taken."""
        return [stream for stream in self._state.streams.values() if stream.queued]

    def queued(self, stream_id: int) -> int:
        """Return how many bytes wait; when it falls to 0, `on_writable` comes."""
        stream = self._state.streams.get(stream_id)
        return 0 if stream is None else stream.queued

    def reset(self, stream_id: int, code: int) -> None:
        """Close a stream with RST_STREAM, and drop what it has queued; no callback comes."""
        if stream_id in self._state.streams:
            self._sender.reset(stream_id, code)

    # -- the connection -------------------------------------------------------------------------

    def ping(self, payload: bytes) -> None:
        """Send a PING of eight bytes; `on_pong` comes with its answer."""
        self._sender.control(frame(PING, 0, 0, payload))

    def drain(self) -> None:
        """Ask the peer for no more streams; when it knows (a PING later), accept none any more."""
        if not (self._draining or self._state.refusing or self._state.closed):
            self._draining = True
            self._sender.control(goaway_frame(MAX_STREAM_ID, Http2ErrorCode.NO_ERROR, ""))
            self._sender.control(frame(PING, 0, 0, _DRAIN_PING))

    def goaway(self) -> None:
        """Accept no more streams; when those that are open have ended, the connection is closed."""
        state = self._state
        if not (state.refusing or state.closed):
            state.refusing = True
            self._sender.control(goaway_frame(state.last_stream_id, Http2ErrorCode.NO_ERROR, ""))
            if not state.streams:
                self._finish()

    def close(self, code: Http2ErrorCode, text: str) -> None:
        """End the connection now, with GOAWAY; open streams are dropped.

        Parameters
        ----------
        code : Http2ErrorCode
            Why.
        text : str
            What was expected and what came; the peer gets it as debug data.
        """
        if not self._state.closed:
            self._sender.control(goaway_frame(self._state.last_stream_id, code, text))
            self._end(code, text)

    def _finish(self) -> None:
        """The last stream is closed after a GOAWAY."""
        if not self._state.closed:
            self._end(Http2ErrorCode.NO_ERROR, "")

    def _end(self, code: Http2ErrorCode, text: str) -> None:
        self._state.closed = True
        self._sender.close()
        self._handler.on_closed(code, text)

    def _on_pong(self, payload: bytes) -> None:
        if self._draining and payload == _DRAIN_PING:
            self.goaway()
        else:
            self._handler.on_pong(payload)

    def _reset_faulty(self, fault: StreamFault) -> None:
        """Answer a stream fault.

        Raises
        ------
        ConnectionFault
            There were too many.
        """
        self._state.spend_reset()
        if self._sender.reset(fault.stream_id, fault.code) is not None:
            self._handler.on_reset(fault.stream_id, fault.code)
