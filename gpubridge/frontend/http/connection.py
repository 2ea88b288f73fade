"""An HTTP/1.1 connection: its transport, routing of requests, timeouts and closing.

`HttpConnectionState` (compiled) implements the protocol: it parses bytes, calls `take` once for each
request, encodes responses and keeps their order.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections.abc import Sequence
from functools import partial

from gpubridge.config import HttpConnections
from gpubridge.dataplane import (
    HttpConnectionState,
    HttpExchange,
    HttpOrigins,
    IdleConnections,
    InferTargets,
    RequestCounts,
)
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, Pieces, invalid
from gpubridge.frontend.answered import HTTP_ENDPOINTS, client_of
from gpubridge.frontend.connection_limits import Room, longest_idle, room_for, shortage
from gpubridge.frontend.http.coded_bodies import CodedBodies, CollectedBody
from gpubridge.frontend.http.message import (
    FAULTS,
    Fault,
    HttpSettings,
    RequestHandler,
    Router,
    other_host,
    other_page,
)
from gpubridge.frontend.kept_bytes import KeptBytes
from gpubridge.frontend.timeouts import Deadline, MinimumRate, SendStall, bytes_per_second
from gpubridge.host_shm import LARGE_BYTES, Account, Body, Budget
from gpubridge.telemetry.failed_requests import FailedRequests
from gpubridge.telemetry.logs import request_error

_logger = logging.getLogger(__name__)

_LINGER_SECONDS = 10.0
_RECEIVE_BYTES = 16 * 1024
_REFUSED_WITH_RESPONSE = 64
"""Connections over the limit that get a 503; further ones are just closed."""
_TCP_CLOSED = 7
_TCP_CLOSE_WAIT = 8
"""The kernel's TCP states: closed or reset; closed by the client for sending."""


class Stage(enum.IntEnum):
    """The part of a request being received, numbered as by `HttpConnectionState.progress`."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class Late(enum.Enum):
    """Phase of a connection that has timed out."""

    HEAD = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()


class ConnectionTimeouts:
    """The timeouts of one connection."""

    def __init__(self, limits: HttpConnections) -> None:
        self._head = Deadline(limits.header_timeout)
        self._body = MinimumRate(limits.body_timeout)
        self._idle = Deadline(limits.idle_timeout)
        self._sending = SendStall(limits.send_timeout)
        self._lingering = Deadline(_LINGER_SECONDS)

    def stuck(self, now: float, unsent: int, *, closing: bool) -> bool:
        """Return whether the client does not read, or does not close after the last response."""
        slow = self._sending.too_slow(now, unsent)
        return self._lingering.too_long(now, True if closing and not unsent else None) or slow

    def late(
        self, now: float, progress: tuple[int, int, int], served: int, *, idle: bool
    ) -> Late | None:
        """Return the phase that has timed out, if any.

        ``progress``: the result of `HttpConnectionState.progress`.
        """
        stage, message, nbytes = progress
        if self._head.too_long(now, message if stage == Stage.HEAD else None):
            return Late.HEAD
        if self._body.too_slow(now, message if stage == Stage.BODY else None, nbytes, nbytes):
            return Late.BODY
        waits = idle and stage == Stage.NOTHING
        return Late.IDLE if self._idle.too_long(now, served if waits else None) else None


class HttpListener:
    """State shared by all connections of one listening socket.

    - ``targets``: the inference endpoints, whose plain requests do not reach the router.
    - ``origins``: the pages and hosts whose requests are taken.

    Attributes: ``receive``, the receive buffer (each connection consumes its bytes before it returns to the
    event loop); ``counts``, which counts the answers; ``failures``, which logs those that failed.
    """

    def __init__(
        self,
        router: Router,
        settings: HttpSettings,
        workers: Workers,
        budget: Budget,
        targets: InferTargets | None = None,
        origins: HttpOrigins | None = None,
    ) -> None:
        self.router = router
        self.targets = InferTargets() if targets is None else targets
        self.origins = HttpOrigins() if origins is None else origins
        self.counts = RequestCounts(len(HTTP_ENDPOINTS))
        self.failures = FailedRequests()
        self.settings = settings
        self.budget = budget
        self.receive = bytearray(_RECEIVE_BYTES)
        self.idle = IdleConnections()
        self.coded = CodedBodies(settings.body_limit, workers, budget)


class HttpConnection(asyncio.BufferedProtocol):
    """The connection of one client."""

    def __init__(self, listener: HttpListener, connections: set[HttpConnection]) -> None:
        self._listener = listener
        self._settings = listener.settings
        self._connections = connections
        self._transport: asyncio.Transport
        self._route = listener.router.route
        self._timeouts = ConnectionTimeouts(self._settings.connections)
        self.account = Account(lambda: self.unsent)
        self._kept = KeptBytes()
        self._lingering = False
        self._closing = False
        state = self._state = HttpConnectionState(
            self,
            listener.receive,
            listener.idle,
            listener.targets,
            listener.origins,
            listener.counts,
            self._settings.body_limit,
        )
        # Called for every read, so without a Python method between.
        self.get_buffer = state.get_buffer  # type: ignore[method-assign, assignment]
        self.buffer_updated = state.buffer_updated  # type: ignore[method-assign, assignment]

    # -- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; at a limit, close an idle connection or refuse this one."""
        self._transport = transport  # type: ignore[assignment]
        room = room_for(transport.get_extra_info("socket"), len(self._connections))
        most = self._settings.connections.max_connections
        refused = 0 < most <= len(self._connections) and not self._close_idle()
        self._connections.add(self)
        if self._listener.counts.access_log is not None:
            self._state.set_client(client_of(transport))
        self._state.start(self._transport.write, self._transport.writelines)
        if room is Room.NONE or (
            refused and len(self._connections) > most + _REFUSED_WITH_RESPONSE
        ):
            self.abort()
            return
        if room is Room.SHORT:
            self._refuse(503, shortage())
            return
        if not refused:
            return
        self._refuse(
            503,
            f"the server has {most} connections open, which is the most it takes "
            "(--http-max-connections), and none of them is idle: try again later",
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Abort unfinished requests."""
        self._connections.discard(self)
        self._closing = True
        self._state.lose()
        self._kept.close()
        self.account.close()

    def eof_received(self) -> bool:
        """Answer received requests, then close: the client has closed its sending side."""
        self._state.end()
        return self._state.open > 0 and not self._closing

    def pause_writing(self) -> None:
        """Stop reading: the client reads too slowly."""
        self._state.set_stalled(True)

    def resume_writing(self) -> None:
        """Continue: the client has read what was sent."""
        self._state.set_stalled(False)

    # -- the server ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Answer received requests, then close."""
        self._state.drain()
        if self._lingering and not self._state.in_body:
            self._transport.close()

    def finish(self) -> None:
        """Refuse the request that is being received."""
        if self._state.in_body or self._state.progress()[0] != Stage.NOTHING:
            self._refuse(503, "the server is stopping")

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._state.close()
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes of responses not yet written to the socket."""
        return self._transport.get_write_buffer_size()

    def check_unread(self) -> None:
        """Close where another answer would wait behind more than a connection's share of memory."""
        unread, most = self.unsent, self._listener.budget.share
        if unread > most:
            text = "connection of %s closed: %d bytes of answers wait while it asks for more, at most %d may"
            _logger.warning(text, client_of(self._transport), unread, most)
            self.abort()

    def check(self, now: float) -> None:
        """Close if a timeout has passed."""
        state, timeouts = self._state, self._timeouts
        unsent = self.unsent
        if timeouts.stuck(now, unsent, closing=self._closing):
            self.abort()
        elif not self._closing:
            idle = not state.open and not unsent
            progress = state.progress()
            late = timeouts.late(now, progress, state.placed, idle=idle)
            limits = self._settings.connections
            if late is Late.HEAD:
                seconds = limits.header_timeout
                self._refuse(408, f"expected the whole head of a request within {seconds:g} s")
            elif late is Late.BODY:
                seconds = limits.body_timeout
                least = bytes_per_second(progress[2])
                self._refuse(
                    408, f"request body too slow: minimum {least} bytes/s over {seconds:g} s"
                )
            elif late is Late.IDLE:
                self._close()
            if state.open and (state.stopped or not state.reading):
                self._look_for_client()

    def _look_for_client(self) -> None:
        """Abort if the client is gone, which asyncio does not report while reading is paused.

        A client that closes its socket and one that closes only its sending side both send a FIN.
        They differ when they receive bytes after it: a closed socket resets the connection.
        """
        sock = self._transport.get_extra_info("socket")
        tcp = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if tcp == _TCP_CLOSED:
            self.abort()
        elif tcp == _TCP_CLOSE_WAIT and not self.unsent:
            self._state.probe()

    # -- memory of the wire --------------------------------------------------------------------------

    def charge(self, nbytes: int) -> int:
        """Charge what the client has the connection keep beside large bodies; return the charge."""
        return self._kept.count(
            nbytes, partial(Body, self._listener.budget, self.account), self._shed
        )

    def _shed(self, error: BridgeError) -> int:
        """Refuse what is being received, and read no more: others need the memory."""
        self._state.charged = 0
        self._state.refuse(error, 503)
        return self._state.kept

    # -- the compiled state ------------------------------------------------------------------------

    def take(self, exchange: HttpExchange) -> None:
        """Route a request whose head has been received, and provide memory for its body."""
        try:
            handler = exchange.handler = self._route(exchange)
            length = exchange.length
            if length is None:
                exchange.handler = CollectedBody(handler, partial(self.new_body, exchange))
            elif length > LARGE_BYTES:
                self._receive_large(exchange, handler, length)
            elif length:
                exchange.receive_into(handler.body_memory(length, None), length)
        except Exception as error:
            # Also for a bug: it fails only this request.
            exchange.fail(error)
            return
        if exchange.whole:
            assert length is not None
            self.complete(exchange, length)

    def refuse_asker(self, exchange: HttpExchange, by_host: bool) -> None:
        """Refuse a request that a page of another origin sent, or that is for another host."""
        text = other_host(exchange) if by_host else other_page(exchange)
        exchange.fail(invalid(text), 403)

    def _receive_large(self, exchange: HttpExchange, handler: RequestHandler, length: int) -> None:
        """Receive a body whose memory is charged as it arrives."""
        body = self.new_body(exchange)
        try:
            memory = handler.body_memory(length, body)
        except Exception:
            body.release()
            raise
        granted = self.grow(exchange, 0)
        if granted:
            exchange.receive_into(memory, granted)

    def new_body(self, exchange: HttpExchange) -> Body:
        """Return the charge of a large body, which may be refused when memory runs out."""
        return Body(self._listener.budget, self.account, exchange.give_up)

    def grow(self, exchange: HttpExchange, arrived: int) -> int:
        """Return how many bytes of a body may be received after ``arrived``; 0 if it was refused."""
        handler: RequestHandler = exchange.handler
        try:
            return handler.grow(arrived)
        except Exception as error:
            exchange.give_up(error)
            return 0

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Pass a complete request to its handler."""
        handler = exchange.handler
        assert handler is not None
        try:
            handler.complete(exchange, copied)
        except Exception as error:
            exchange.give_up(error)

    def collect(self, exchange: HttpExchange, body: bytearray) -> None:
        """Pass a request with a chunked or compressed body to its handler."""
        self._listener.coded.unpack(exchange, body, self.complete)

    def pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        body: bytes,
        buffers: Sequence[bytes | memoryview],
    ) -> None:
        """Respond with a coding that the client accepts."""
        self._listener.coded.pack(exchange, status, fields, [body, *buffers])

    def failure(
        self, error: Exception, status: int | None, exchange: HttpExchange
    ) -> tuple[int, Pieces]:
        """Return the status and the JSON body of an error; a model counts what it has not got."""
        failed = request_error(error)
        if exchange.counters is not None:
            exchange.counters.refused(failed)
            exchange.counters = None
        self.log_failure(failed, exchange)
        return self._listener.router.failure(failed, status, exchange)

    def log_failure(self, error: BridgeError, exchange: HttpExchange) -> None:
        """Log the error of a request, if it is a fault of its model or the server."""
        client = client_of(self._transport)
        self._listener.failures.log(error, "http", client, exchange.number)

    def refuse(self, fault: int, exchange: HttpExchange | None) -> None:
        """Refuse a malformed request by the number of its fault."""
        if fault == Fault.BODY_TOO_LONG and exchange is not None:
            length = (exchange.field(b"content-length") or b"").decode("latin-1")
            self._refuse(413, self._settings.too_long(f"of {length} bytes"))
        elif fault == Fault.CHUNKS_TOO_LONG:
            self._refuse(413, self._settings.too_long("in chunks"))
        else:
            self._refuse(*FAULTS[fault])

    def changed(self, close: bool) -> None:
        """Pause or resume reading as the state requires, or close."""
        if close:
            self._close()
        elif not self._state.reading:
            self._transport.pause_reading()
        elif self._state.has_pending:
            # Later: the receive buffer may be in use now.
            asyncio.get_running_loop().call_soon(self._continue)
        else:
            self._transport.resume_reading()

    def _continue(self) -> None:
        """Parse bytes received earlier, then resume reading."""
        self._state.go_on()
        if self._state.reading and not self._closing:
            self._transport.resume_reading()

    # -- closing ------------------------------------------------------------------------------------

    def _refuse(self, status: int, text: str) -> None:
        """Queue an error response after the pending ones; read no further request."""
        self._state.refuse(invalid(text), status)

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        connection = longest_idle(self._listener.idle)
        if connection is None:
            return False
        self._connections.discard(connection)
        connection._close()
        return True

    def _close(self) -> None:
        self._kept.close()
        may_send = self._state.close()
        if may_send and not self._closing:
            # The client may still be sending. Closing now would make the kernel reset the connection,
            # and the client lose its response: input is dropped until the client closes.
            self._closing = self._lingering = True
            self._transport.write_eof()
        else:
            self._closing = True
            self._transport.close()
