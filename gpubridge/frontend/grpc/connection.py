"""One client's connection: bytes between its socket and HTTP/2, streams to calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from gpubridge.config import GrpcConnections
from gpubridge.dataplane import GrpcConnectionState, Http2Connection, Http2Limits, RequestHeaders
from gpubridge.frontend.connection_limits import longest_idle
from gpubridge.frontend.grpc.call import Call, LargeMessageCall, read_timeout
from gpubridge.frontend.grpc.events import (
    BEGIN,
    CALL,
    CLOSED,
    DATA,
    FAILED,
    FILLED,
    LARGE,
    MESSAGES,
    PING,
    RESET,
    WRITABLE,
    framing_failure,
)
from gpubridge.frontend.grpc.infer import InferCall
from gpubridge.frontend.grpc.packing import accepted_packing
from gpubridge.frontend.grpc.service import GrpcService
from gpubridge.frontend.grpc.status import CallFailed, Status, failure
from gpubridge.frontend.grpc.watch import Finding, Watch
from gpubridge.host_shm import Account
from gpubridge.protocol.grpc.receiver import RequestReceiver

_CODINGS = (b"", b"identity", b"gzip", b"deflate")
_KEEPALIVE_PING = b"keepaliv"
_ENHANCE_YOUR_CALM = 11
_SETTINGS_TIMEOUT = 4


class GrpcConnection(asyncio.BufferedProtocol):
    """A client's connection."""

    def __init__(
        self, service: GrpcService, limits: GrpcConnections, connections: set[GrpcConnection]
    ) -> None:
        self.http2 = Http2Connection(service.methods, Http2Limits())
        self.account = Account(self._unread)
        self.coder = service.coder
        self._service = service
        self._connections = connections
        self._calls: dict[int, Call] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._max_connections = limits.max_connections
        self._compression = limits.infer_response_compression_level
        self._message_timeout = limits.message_timeout
        self._watch = Watch(limits, self._loop.time())
        # When something had come at the last look; whether the client was asked to leave.
        self._heard = 0.0
        self._leaving = False
        # Whose answers may be compressed, those calls are Python's.
        infer = service.infer if self._compression == "none" else None
        state = self._state = GrpcConnectionState(
            self.http2, self, self._calls, infer, service.idle
        )
        # asyncio calls these for every read, and calls the last for every answer: no detour.
        self.get_buffer = state.get_buffer  # type: ignore[method-assign, assignment]
        self.buffer_updated = state.buffer_updated  # type: ignore[method-assign, assignment]
        self.flush_soon = state.flush_soon

    # -- what asyncio calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start: our settings go first. Where all connections are taken, one has to go."""
        self._transport = transport  # type: ignore[assignment]
        # Told of every byte that the socket does not take: then nothing is written past it.
        self._transport.set_write_buffer_limits(high=0)
        # Through TLS nothing is written past the transport.
        plain = transport.get_extra_info("ssl_object") is None
        descriptor = transport.get_extra_info("socket").fileno() if plain else -1
        self._state.start(transport, descriptor, self._loop.call_soon)
        self.http2.received(0, monotonic())
        self._heard = self.http2.heard
        if 0 < self._max_connections <= len(self._connections):
            idle = longest_idle(self._service.idle)
            if idle is not None:
                idle.leave()
            else:
                self.http2.close(
                    _ENHANCE_YOUR_CALM,
                    f"expected at most {self._max_connections} connections "
                    "(--grpc-max-connections), all with calls open, got one more",
                )
        self._connections.add(self)
        self._state.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self._state.lose()
        self._abort_calls()
        self.account.close()

    def eof_received(self) -> bool:
        """The client sends no more: what it has asked is answered, then the connection closes."""
        if not self._calls:
            # What has just been answered may not be on its way yet.
            self._state.flush()
            return False
        self._state.hung_up = True
        self.http2.goaway()
        self._state.end_input()
        for call in list(self._calls.values()):
            call.cut_short()
        self.flush_soon()
        return True

    def pause_writing(self) -> None:
        """The client reads too slowly: neither read from it nor take more to be sent."""
        self._state.paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._state.paused = False
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

    def leave(self) -> None:
        """Close an idle connection: another client needs its place."""
        self.http2.goaway()
        self._connections.discard(self)
        self._state.flush()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def _unread(self) -> int:
        """Return the bytes of answers that the client has not read."""
        return self.unsent + sum(map(self.http2.queued, self._calls))

    def check(self, now: float) -> None:
        """Ping a silent client; ask one to leave, or end the connection, if it is time."""
        http2 = self.http2
        before, self._heard = self._heard, http2.heard
        heard = self._heard != before
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
            http2.close(_SETTINGS_TIMEOUT, "expected the client preface and SETTINGS in time")
        self._state.flush()

    def _end_unwanted(self, now: float) -> None:
        """End the calls whose answers the client does not let through."""
        http2 = self.http2
        held_back = [] if self._state.paused else http2.held_back()
        for stream_id in self._watch.unwanted(now, held_back, http2.queued):
            # What clients call RESOURCE_EXHAUSTED; trailers would have to stand behind the answer.
            http2.reset(stream_id, _ENHANCE_YOUR_CALM)
            self._abort(stream_id)
            self.flush_soon()

    # -- what calls ask --------------------------------------------------------------------------

    def forget(self, stream_id: int) -> None:
        """A call has ended."""
        self._calls.pop(stream_id, None)

    # -- what the compiled half tells --------------------------------------------------------------

    def flushed(self, outcome: tuple[list[memoryview], list[Any], bool] | None) -> None:
        """Pass on what the socket has not taken, as `Http2Connection.flush` returns it."""
        left, events, more = outcome or ((), (), False)
        if left:
            self._transport.writelines(left)
        if events:
            self.take(events)
        if more or events or (left and not self._state.paused):
            self.flush_soon()
        # Who sends no more widens no window: what is held back now never goes.
        state = self._state
        if (self.http2.closed and not more) or (
            state.hung_up and not state.paused and self.http2.held_back()
        ):
            self._transport.close()

    def take(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Take what has happened."""
        for event in events:
            try:
                self._take(event)
            except Exception as error:
                # A bug fails its call alone; the others of the connection go on.
                call = self._calls.get(event[1])
                if call is None:
                    self._refuse(event[1], error)
                else:
                    call.refuse(error)

    def _take(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == CALL:
            _, stream_id, method, headers, message, compressed = event
            call = self._open(stream_id, method, headers)
            if call is not None:
                call.messages(len(message), [message], compressed, True)
        elif kind == BEGIN:
            self._open(*event[1:4])
        elif kind == CLOSED:
            self._abort_calls()
        elif kind == PING:
            self._ping_came()
        else:
            self._tell_call(kind, event)

    def hand_over(
        self,
        stream_id: int,
        method: int,
        headers: RequestHeaders,
        receiver: RequestReceiver | None,
        end: bool,
    ) -> Call | None:
        """Take a plain inference call over, with what has come of a large message.

        ``end``: no more comes.
        """
        call = self._open(stream_id, method, headers)
        if receiver is not None:
            assert isinstance(call, InferCall)
            call.go_on(receiver, end)
        return call

    def _tell_call(self, kind: int, event: tuple[Any, ...]) -> None:
        """Tell a call what has happened on its stream."""
        stream_id = event[1]
        call = self._calls.get(stream_id)
        if call is None:
            # It has ended, or never was one.
            return
        if kind == MESSAGES:
            call.messages(*event[2:])
        elif kind in (DATA, LARGE, FILLED):
            assert isinstance(call, LargeMessageCall)
            if kind == DATA:
                call.data(event[2], event[3])
            elif kind == LARGE:
                call.large(event[2])
            else:
                call.filled(event[2])
        elif kind == WRITABLE:
            call.writable()
        elif kind == FAILED:
            call.refuse(framing_failure(*event[2:]))
        elif kind == RESET:
            self._abort(stream_id)

    def _open(self, stream_id: int, method: int, headers: RequestHeaders) -> Call | None:
        """A call begins; None if it has ended already."""
        try:
            if not headers.plain:
                _check(headers)
            call = self._service.open(method, self, stream_id, headers)
        except CallFailed as error:
            self._refuse(stream_id, error)
            return None
        self._calls[stream_id] = call
        if self._compression != "none":
            packing = accepted_packing(headers.accepted_codings, self._compression)
            if packing is not None:
                call.pack(packing)
        if not headers.plain and headers.timeout is not None:
            call.limit_time(read_timeout(headers.timeout) or 0.0)
        return call

    def _refuse(self, stream_id: int, error: Exception) -> None:
        self.http2.send_headers(stream_id, failure(error, begun=False), True)

    def _abort(self, stream_id: int) -> None:
        """Note that a call's client has gone."""
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.abort()

    def _ping_came(self) -> None:
        """End the connection of a client that pings too often."""
        http2 = self.http2
        if self._watch.keepalive.ping_came(
            self._loop.time(), calls=http2.open_streams, sent=http2.frames_sent
        ):
            # The text that gRPC clients look for, to ping less often from then on.
            http2.close(_ENHANCE_YOUR_CALM, "too_many_pings")

    def _abort_calls(self) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.abort()


def _check(headers: RequestHeaders) -> None:
    """Raise CallFailed for headers of a call that gRPC cannot read."""
    if headers.coding not in _CODINGS:
        raise CallFailed(
            Status.UNIMPLEMENTED,
            f"grpc-encoding: expected identity, deflate or gzip, got {headers.coding!r}",
        )
    timeout = headers.timeout
    if timeout is not None and read_timeout(timeout) is None:
        raise CallFailed(
            Status.INTERNAL,
            f"grpc-timeout: expected digits and a unit of H M S m u n, got {timeout!r}",
        )
