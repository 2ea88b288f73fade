"""A gRPC connection: bytes between its socket and HTTP/2, and the calls of its streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from gpubridge.config import GrpcConnections
from gpubridge.dataplane import (
    GrpcConnectionState,
    HeaderFields,
    Http2Connection,
    Http2Limits,
    RequestHeaders,
)
from gpubridge.errors import BridgeError
from gpubridge.frontend.answered import client_of
from gpubridge.frontend.connection_limits import Room, longest_idle, room_for, shortage
from gpubridge.frontend.grpc.call import Call, SingleMessageCall, UnaryCall, read_timeout
from gpubridge.frontend.grpc.connection_timeouts import ConnectionTimeouts, TimeoutAction
from gpubridge.frontend.grpc.infer import InferCall
from gpubridge.frontend.grpc.packing import accepted_packing
from gpubridge.frontend.grpc.service import GrpcService
from gpubridge.frontend.grpc.status import CallFailed, Status, failure, framing_failure
from gpubridge.frontend.kept_bytes import KeptBytes
from gpubridge.host_shm import Account, Body
from gpubridge.protocol.grpc.receiver import RequestReceiver
from gpubridge.telemetry.logs import request_error

# Events of `Http2Connection` are tuples: kind, stream (0 for the connection), and the values that are
# named here.
CALL: Final = 0
"""A call with its only message: method, headers, message, whether it is compressed."""
BEGIN: Final = 1
"""A call has begun: method (-1 if unknown), headers, whether its request has ended."""
MESSAGES: Final = 2
"""Messages: bytes received, messages, whether they are compressed, whether the request has ended."""
DATA: Final = 3
"""Part of a large message: a view, valid until more is received, and whether it is the last."""
FILLED: Final = 4
"""The memory given to ``receive_into`` is full: whether the request has ended."""
FAILED: Final = 5
"""Malformed message: fault, value and limit; see `framing_failure`."""
RESET: Final = 6
"""The stream is gone, reset by the peer or for a protocol error: the code."""
WRITABLE: Final = 7
"""All bytes queued for the stream have been sent."""
PING: Final = 8
"""The peer has sent a PING, which has been answered."""
PONG: Final = 9
"""The peer has answered our PING: its payload."""
CLOSED: Final = 10
"""The connection has ended with its streams: a code and a text."""
LARGE: Final = 11
"""A large message begins, received in pieces: its size, whether it is compressed."""

_GRPC_TYPE = re.compile(rb"application/grpc(?:[+;]|\Z)")
_SHOWN = 100
"""Bytes of a client's header in an error."""
_CODINGS = (b"", b"identity", b"gzip", b"deflate")
_KEEPALIVE_PING = b"keepaliv"
_ENHANCE_YOUR_CALM = 11
_SETTINGS_TIMEOUT = 4


class GrpcConnection(asyncio.BufferedProtocol):
    """The connection of one client."""

    def __init__(
        self, service: GrpcService, limits: GrpcConnections, connections: set[GrpcConnection]
    ) -> None:
        self.http2 = Http2Connection(service.methods, Http2Limits())
        self.account = Account(self._unread)
        self.coder = service.coder
        self._kept = KeptBytes()
        self._service = service
        self._connections = connections
        self.calls: dict[int, Call] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._limits = limits
        self._timeouts = ConnectionTimeouts(limits, self._loop.time())
        # The compiled endpoint does not compress: such calls are left to Python.
        infer = service.infer if limits.infer_response_compression_level == "none" else None
        state = self._state = GrpcConnectionState(self.http2, self, self.calls, infer, service.idle)
        # Called for every read and every response, so without a Python method between.
        self.get_buffer = state.get_buffer  # type: ignore[method-assign, assignment]
        self.buffer_updated = state.buffer_updated  # type: ignore[method-assign, assignment]
        self.flush_soon = state.flush_soon

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our settings; at a limit, close an idle connection or this one."""
        self._transport = transport  # type: ignore[assignment]
        # pause_writing is called for every unsent byte, so that nothing is written out of order.
        self._transport.set_write_buffer_limits(high=0)
        # With TLS, bytes are written to the transport only, not to the socket.
        plain = transport.get_extra_info("ssl_object") is None
        descriptor = transport.get_extra_info("socket").fileno() if plain else -1
        self._state.start(transport, descriptor, self._loop.call_soon)
        if self._service.methods.counts.access_log is not None:
            self.http2.set_client(client_of(transport))
        self.http2.received(0, monotonic())
        self._timeouts.heard = self.http2.heard
        most = self._limits.max_connections
        if 0 < most <= len(self._connections):
            idle = longest_idle(self._service.idle)
            if idle is not None:
                idle.leave()
            else:
                self.http2.close(
                    _ENHANCE_YOUR_CALM,
                    f"expected at most {most} connections "
                    "(--grpc-max-connections), all with calls open, got one more",
                )
        room = room_for(transport.get_extra_info("socket"), len(self._connections))
        if room is Room.SHORT:
            self.http2.close(_ENHANCE_YOUR_CALM, shortage())
        self._connections.add(self)
        self._state.flush()
        if room is Room.NONE:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Abort all open calls."""
        self._connections.discard(self)
        self._state.lose()
        self._abort_calls()
        self._kept.close()
        self.account.close()

    def eof_received(self) -> bool:
        """Answer the open calls, then close: the client has closed its sending side."""
        if not self.calls:
            # A response may still be queued.
            self._state.flush()
            return False
        self._state.hung_up = True
        self.http2.goaway()
        self._state.end_input()
        for call in list(self.calls.values()):
            call.input_ended()
        self.flush_soon()
        return True

    def pause_writing(self) -> None:
        """Stop reading and sending: the client reads too slowly."""
        self._state.paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue: the client has read what was sent."""
        self._state.paused = False
        self._transport.resume_reading()
        self.flush_soon()

    # -- the server ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new calls; close when the open ones have ended."""
        self.http2.goaway()
        for call in list(self.calls.values()):
            call.drain()
        self.flush_soon()

    def finish(self) -> None:
        """Fail the calls that are still open."""
        for call in list(self.calls.values()):
            call.fail(CallFailed(Status.UNAVAILABLE, "the server is stopping"))

    def leave(self) -> None:
        """Close this idle connection in favour of a new one."""
        self.http2.goaway()
        self._connections.discard(self)
        self._state.flush()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that have not been written to the socket yet."""
        return self._transport.get_write_buffer_size()

    def _unread(self) -> int:
        """Return the bytes of responses that the client has not read."""
        return self.unsent + self.http2.all_queued

    def check(self, now: float) -> None:
        """Act on timeouts: ping the client, send GOAWAY, or end the connection."""
        http2 = self.http2
        action = self._timeouts.check(now, http2, self.unsent)
        for call in list(self.calls.values()):
            call.check(now, self._limits.message_timeout)
        self._reset_stalled(now)
        if action is None:
            return
        if action is TimeoutAction.END:
            self.abort()
            return
        if action is TimeoutAction.PING:
            http2.ping(_KEEPALIVE_PING)
        elif action is TimeoutAction.LEAVE:
            http2.drain()
        elif action is TimeoutAction.CALM:
            http2.close(_ENHANCE_YOUR_CALM, "expected the end of a header block in time")
        else:
            http2.close(_SETTINGS_TIMEOUT, "expected the client preface and SETTINGS in time")
        self._state.flush()

    def _reset_stalled(self, now: float) -> None:
        """Reset streams whose responses the client's flow control holds back for too long."""
        http2 = self.http2
        held_back = [] if self._state.paused else http2.held_back()
        for stream_id in self._timeouts.stalled(now, held_back, http2.queued):
            # Clients report this reset as RESOURCE_EXHAUSTED; trailers could not overtake the data.
            http2.reset(stream_id, _ENHANCE_YOUR_CALM)
            self._abort(stream_id)
            self.flush_soon()

    # -- memory of the wire ------------------------------------------------------------------------

    def new_body(self, refuse: Callable[[BridgeError], None]) -> Body:
        """Return the charge of a large message of this connection; see `Body`."""
        return self.coder.new_body(self.account, refuse)

    def charge(self, nbytes: int) -> int:
        """Charge what the client has the connection keep beside large messages; return the charge."""
        return self._kept.count(nbytes, self.new_body, self._shed)

    def _shed(self, error: BridgeError) -> int:
        """Refuse the calls whose messages are unfinished: others need the memory.

        The others go on: what they wait for may come yet. Further calls are refused.
        """
        self._state.charged = 0
        for id_, call in list(self.calls.items()):
            if self.http2.unfinished(id_) and not self._may_pass(call):
                call.refuse(error)
        self.flush_soon()
        return self.http2.kept

    def _may_pass(self, call: Call) -> bool:
        """Return whether a call is taken where there is no memory for further ones.

        A control call may free what the open requests wait for, so that these never stand in its way.
        """
        return isinstance(call, UnaryCall) and not self._state.full_of_control

    @property
    def shortage(self) -> BridgeError | None:
        """Return why there is no memory for another call or request, if there is none."""
        error = self._kept.shortage
        if not self._state.full or error is None:
            return None
        calls, nbytes = self.http2.open_streams, self.http2.kept
        return BridgeError(
            f"the {calls} open calls of this connection and their requests keep {nbytes} bytes beside "
            f"their tensors, and there is no memory for more: {error.message}",
            error.code,
        )

    # -- calls -----------------------------------------------------------------------------------

    def forget(self, stream_id: int) -> None:
        """Remove a call that has ended."""
        self.calls.pop(stream_id, None)

    # -- the compiled connection state -------------------------------------------------------------

    def flushed(self, outcome: tuple[list[memoryview], list[Any], bool] | None) -> None:
        """Handle the result of `Http2Connection.flush`: unsent bytes, events, and whether more is queued."""
        left, events, more = outcome or ((), (), False)
        if left:
            self._transport.writelines(left)
        if events:
            self.take(events)
        if more or events or (left and not self._state.paused):
            self.flush_soon()
        # A client that closed its sending side sends no WINDOW_UPDATE for what is held back.
        state = self._state
        if (self.http2.closed and not more) or (
            state.hung_up and not state.paused and self.http2.held_back()
        ):
            self._transport.close()

    def take(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Handle events."""
        for event in events:
            try:
                self._take(event)
            except Exception as error:
                # A bug fails only the call concerned.
                call = self.calls.get(event[1])
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
            self._ping_received()
        else:
            self._dispatch(kind, event)

    def hand_over(
        self,
        stream_id: int,
        method: int,
        headers: RequestHeaders,
        receiver: RequestReceiver | None,
        end: bool,
    ) -> Call | None:
        """Take over an inference call, with the received part of its large message.

        ``end``: the request has ended.
        """
        call = self._open(stream_id, method, headers)
        if receiver is not None:
            assert isinstance(call, InferCall)
            call.resume(receiver, end)
        return call

    def _dispatch(self, kind: int, event: tuple[Any, ...]) -> None:
        """Pass an event to the call of its stream."""
        stream_id = event[1]
        call = self.calls.get(stream_id)
        if call is None:
            # It has ended already, or had no memory for its message.
            if kind == FAILED:
                self._refuse(stream_id, framing_failure(*event[2:]))
            return
        if kind == MESSAGES:
            call.messages(*event[2:])
        elif kind in (DATA, LARGE, FILLED):
            assert isinstance(call, SingleMessageCall)
            if kind == DATA:
                call.data(event[2], event[3])
            elif kind == LARGE:
                call.large(event[2], event[3])
            else:
                call.filled(event[2])
        elif kind == WRITABLE:
            call.writable()
        elif kind == FAILED:
            call.refuse(framing_failure(*event[2:]))
        elif kind == RESET:
            self._abort(stream_id)

    def _open(self, stream_id: int, method: int, headers: RequestHeaders) -> Call | None:
        """Open a call; return None if it was refused."""
        try:
            if not headers.plain:
                _check(headers)
            call = self._service.open(method, self, stream_id, headers)
            if (shortage := self.shortage) is not None and not self._may_pass(call):
                raise shortage
        except (CallFailed, BridgeError) as error:
            self._refuse(stream_id, error)
            return None
        self.calls[stream_id] = call
        level = self._limits.infer_response_compression_level
        if level != "none":
            packing = accepted_packing(headers.accepted_codings, level)
            if packing is not None:
                call.pack(packing)
        if not headers.plain and headers.timeout is not None:
            call.limit_time(read_timeout(headers.timeout) or 0.0)
        return call

    def _refuse(self, stream_id: int, error: Exception) -> None:
        fields = self.failure(error, self.http2.number(stream_id))
        self.http2.send_headers(stream_id, fields, True)

    def failure(self, error: Exception, number: int, *, begun: bool = False) -> HeaderFields:
        """Return the header fields of a call that fails, which is logged.

        ``number``: of the call in the access log; ``begun``: whether response headers have been sent.
        """
        if not isinstance(error, CallFailed):
            error = request_error(error)
            self.log_failure(error, number)
        return failure(error, begun=begun)

    def log_failure(self, error: BridgeError, number: int) -> None:
        """Log the error of a request, if it is a fault of its model or the server."""
        self._service.failures.log(error, "grpc", client_of(self._transport), number)

    def _abort(self, stream_id: int) -> None:
        """Abort the call of a stream that is gone."""
        call = self.calls.pop(stream_id, None)
        if call is not None:
            call.abort()

    def _ping_received(self) -> None:
        """End the connection of a client that pings too often."""
        http2 = self.http2
        if self._timeouts.keepalive.ping_received(
            self._loop.time(), calls=http2.open_streams, sent=http2.frames_sent
        ):
            # gRPC clients recognize this text and ping less often.
            http2.close(_ENHANCE_YOUR_CALM, "too_many_pings")

    def _abort_calls(self) -> None:
        calls = list(self.calls.values())
        self.calls.clear()
        for call in calls:
            call.abort()


def _check(headers: RequestHeaders) -> None:
    """Raise CallFailed for what is no call, an unknown encoding or a malformed timeout."""
    fields = dict(headers.fields)
    method, kind = fields[b":method"], fields.get(b"content-type", b"")
    if method != b"POST":
        text = f"expected POST, got {method[:_SHOWN]!r}: this port serves gRPC"
        raise CallFailed(Status.INTERNAL, text, 405)
    if not _GRPC_TYPE.match(kind):
        text = (
            f"expected content-type: application/grpc, got {kind[:_SHOWN]!r}: this port serves gRPC"
        )
        raise CallFailed(Status.INTERNAL, text, 415)
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
