"""One client's connection: bytes between its socket and HTTP/2, streams to calls."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from gpubridge.config import CompressionLevel, GrpcConnections
from gpubridge.frontend.grpc.call import Call, read_timeout
from gpubridge.frontend.grpc.packing import accepted_packing
from gpubridge.frontend.grpc.service import GrpcService
from gpubridge.frontend.grpc.status import CallFailed, Status, failure
from gpubridge.frontend.grpc.vectored_io import read_vector, unsent, write_parts
from gpubridge.frontend.grpc.watch import Finding, Watch
from gpubridge.frontend.http2.connection import Http2Connection
from gpubridge.frontend.http2.faults import Http2ErrorCode
from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.frontend.http2.headers import Fields, RequestHeaders
from gpubridge.frontend.http2.limits import Http2Limits

__all__ = ["GrpcConnection", "GrpcSettings"]

_CODINGS = (b"identity", b"gzip", b"deflate")
_KEEPALIVE_PING = b"keepaliv"
_EMPTY = memoryview(b"")
# Below this no read was one of a body's frame into its place.
_LARGE_READ = 1 << 12
# Then others have their turn.
_SCATTERED_READS = 4


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Limits of a connection.

    Attributes
    ----------
    message_limit : int
        Bytes of a request's message, after decompression too.
    connections : GrpcConnections
        How many connections there may be, and how long they may take.
    http2 : Http2Limits
        What HTTP/2 allows.
    """

    message_limit: int
    connections: GrpcConnections
    http2: Http2Limits


class _Reading:
    """What the headers of a call say to gRPC; found out once for headers that repeat."""

    __slots__ = ("coding", "failed", "packing", "timeout")

    def __init__(self, headers: RequestHeaders, level: CompressionLevel) -> None:
        fields = dict(headers.fields)
        self.packing = accepted_packing(fields.get(b"grpc-accept-encoding", b""), level)
        self.coding = fields.get(b"grpc-encoding", b"identity")
        self.timeout: float | None = None
        self.failed: CallFailed | None = None
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            self.timeout = read_timeout(timeout)
            if self.timeout is None:
                self.failed = CallFailed(
                    Status.INTERNAL,
                    f"grpc-timeout: expected digits and a unit of H M S m u n, got {timeout!r}",
                )
        if self.coding not in _CODINGS:
            self.failed = CallFailed(
                Status.UNIMPLEMENTED,
                f"grpc-encoding: expected identity, deflate or gzip, got {self.coding!r}",
            )


class GrpcConnection(asyncio.BufferedProtocol):
    """A client's connection.

    Parameters
    ----------
    service : GrpcService
        Answers the calls.
    connections : set
        Holds this connection for as long as it is open.

    Attributes
    ----------
    http2 : Http2Connection
        Where calls send their answers.
    """

    def __init__(
        self, service: GrpcService, settings: GrpcSettings, connections: set[GrpcConnection]
    ) -> None:
        self.message_limit = settings.message_limit
        self.http2 = Http2Connection(self, settings.http2, time.monotonic)
        self._service = service
        self._connections = connections
        self._calls: dict[int, Call] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._max_connections = settings.connections.max_connections
        self._compression = settings.connections.infer_response_compression_level
        self._message_timeout = settings.connections.message_timeout
        self._watch = Watch(settings.connections, self._loop.time())
        # Something came since the last look; the client was asked to leave; it sends no more.
        self._heard = self._leaving = self._hung_up = False
        self._paused = False
        self._flush_due = False

    # -- what asyncio calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start: our settings go first; end if there are too many already."""
        self._transport = transport  # type: ignore[assignment]
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._connections.add(self)
        if 0 < self._max_connections < len(self._connections):
            self.http2.close(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"expected at most {self._max_connections} connections "
                "(--grpc-max-connections), got one more",
            )
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self.http2.lost()
        self._abort_calls()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.http2.memory()

    def buffer_updated(self, nbytes: int) -> None:
        """Take ``nbytes`` that have come."""
        self._heard = True
        self.http2.received(nbytes)
        if nbytes >= _LARGE_READ:
            self._read_scattered()
        self._flush()

    def _read_scattered(self) -> None:
        """Receive what else there is of a body in many frames, with few reads."""
        for _ in range(_SCATTERED_READS):
            vector = None if self._paused else self.http2.scatter()
            if vector is None:
                return
            nbytes = read_vector(self._descriptor, vector)
            self.http2.scattered(nbytes)
            if nbytes < vector.nbytes:
                return

    def eof_received(self) -> bool:
        """The client sends no more: what it has asked is answered, then the connection closes."""
        if not self._calls:
            # What has just been answered may not be on its way yet.
            self._flush()
            return False
        self._hung_up = True
        self.http2.goaway()
        for call in list(self._calls.values()):
            call.cut_short()
        self.flush_soon()
        return True

    def pause_writing(self) -> None:
        """The client reads too slowly: neither read from it nor take more to be sent."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        self._transport.resume_reading()
        self.flush_soon()

    # -- what the server asks --------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new calls; close when those that are open have ended."""
        self.http2.goaway()
        for call in list(self._calls.values()):
            call.drain()
        self.flush_soon()

    def finish(self) -> None:
        """End the calls that are still open: nothing more will be answered."""
        for call in list(self._calls.values()):
            call.fail(CallFailed(Status.UNAVAILABLE, "the server is stopping"))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """Ping a silent client; ask one to leave, or end the connection, if it is time."""
        heard, self._heard = self._heard, False
        http2 = self.http2
        finding = self._watch.look(now, http2, self.unsent, leaving=self._leaving, heard=heard)
        for call in list(self._calls.values()):
            call.check(now, self._message_timeout)
        self._end_unwanted(now)
        if finding is None:
            return
        if finding is Finding.END:
            self.abort()
            return
        if finding is Finding.PING:
            http2.ping(_KEEPALIVE_PING)
        elif finding is Finding.LEAVE:
            self._leaving = True
            http2.drain()
        else:
            http2.close(
                Http2ErrorCode.SETTINGS_TIMEOUT, "expected the client preface and SETTINGS in time"
            )
        self._flush()

    def _end_unwanted(self, now: float) -> None:
        """End the calls whose answers the client does not let through."""
        http2 = self.http2
        for stream_id in self._watch.unwanted(now, [] if self._paused else http2.held_back):
            # What clients call RESOURCE_EXHAUSTED; trailers would have to stand behind the answer.
            http2.reset(stream_id, Http2ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(stream_id, Http2ErrorCode.ENHANCE_YOUR_CALM)
            self.flush_soon()

    # -- what calls ask --------------------------------------------------------------------------

    def forget(self, stream_id: int) -> None:
        """A call has ended."""
        self._calls.pop(stream_id, None)

    def flush_soon(self) -> None:
        """Send what calls have left to be sent; once for all that they leave in a turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        http2 = self.http2
        while not self._paused:
            parts = http2.take_output()
            if not parts:
                break
            if self._transport.is_closing():
                # The socket has failed; connection_lost comes, and drops all.
                return
            if len(parts) == 1 and isinstance(parts[0], bytes):
                self._transport.write(parts[0])
            else:
                self._write(parts)
        # Who sends no more widens no window: what is held back now never goes.
        over = http2.closed or (self._hung_up and not self._paused and http2.held_back)
        if over and not self._transport.is_closing():
            self._transport.close()

    def _write(self, parts: list[bytes | memoryview | FrameVector]) -> None:
        """Send parts at once, as far as the socket takes them, the rest in their time."""
        transport = self._transport
        sent = 0 if transport.get_write_buffer_size() else write_parts(self._descriptor, parts)
        left = unsent(parts, sent)
        if left:
            transport.writelines(left)

    # -- what HTTP/2 tells -----------------------------------------------------------------------

    def on_headers(self, stream_id: int, headers: RequestHeaders, end: bool) -> None:
        """A call begins."""
        reading = headers.note
        if not isinstance(reading, _Reading):
            reading = headers.note = _Reading(headers, self._compression)
        call = None
        if reading.failed is None:
            call = self._service.open(self, stream_id, headers, reading.coding)
        if call is None:
            error = reading.failed or CallFailed(Status.UNIMPLEMENTED, "")
            fields = [(b":status", b"200"), (b"content-type", b"application/grpc")]
            self.http2.send_headers(stream_id, [*fields, *failure(error)], end=True)
            return
        self._calls[stream_id] = call
        if reading.packing is not None:
            call.pack(reading.packing)
        if reading.timeout is not None:
            call.limit_time(reading.timeout)
        if end:
            call.data(_EMPTY, True)

    def on_data(self, stream_id: int, view: memoryview, end: bool) -> None:
        """Part of a call's request."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.data(view, end)

    def on_filled(self, stream_id: int, end: bool) -> None:
        """Memory that a call has named is full."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.filled(end)

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """A request ends with trailers, which mean nothing."""
        self.on_data(stream_id, _EMPTY, True)

    def on_reset(self, stream_id: int, code: int) -> None:
        """Nobody waits for a call's answer any more."""
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.abort()

    def on_writable(self, stream_id: int) -> None:
        """What a call had queued is on its way."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.writable()

    def on_ping(self) -> None:
        """End the connection of a client that pings too often."""
        http2 = self.http2
        if self._watch.keepalive.ping_came(
            self._loop.time(), calls=http2.open_streams, sent=http2.frames_sent
        ):
            # The text that gRPC clients look for, to ping less often from then on.
            http2.close(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def on_pong(self, payload: bytes) -> None:
        """The client is there: that anything came says so already."""

    def on_closed(self, code: Http2ErrorCode, text: str) -> None:
        """The connection is over."""
        self._abort_calls()

    def _abort_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.abort()
