"""One HTTP/1.1 connection: what asyncio calls, who takes a request, when to read, how it ends.

`HttpConnectionState` (compiled) has the protocol: it takes bytes and calls `take` once for each
request, encodes answers and keeps their order.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from gpubridge.dataplane import (
    HttpConnectionState,
    HttpExchange,
    IdleConnections,
    InferTargets,
)
from gpubridge.engine.workers import Workers
from gpubridge.errors import Pieces, invalid
from gpubridge.frontend.connection_limits import longest_idle
from gpubridge.frontend.http.coded_bodies import CodedBodies, CollectedBody
from gpubridge.frontend.http.faults import FAULTS, Fault
from gpubridge.frontend.http.message import HttpSettings, RequestHandler, Router
from gpubridge.frontend.http.watch import Late, Stage, Watch
from gpubridge.frontend.lateness import bytes_per_second
from gpubridge.host_shm import LARGE_BYTES, Account, Body, Budget
from gpubridge.telemetry.logs import request_error

_RECEIVE_BYTES = 16 * 1024
_PIPELINE_LIMIT = 32
_HELD_LIMIT = 64 << 20
"""Bytes of bodies that a connection's requests may hold before no further one is read."""
_TOLD_OF_TOO_MANY = 64
"""Connections over the limit that are told so before they are closed; more are just closed."""
_TCP_CLOSED = 7
_TCP_CLOSE_WAIT = 8
"""The kernel's numbers of states of a connection: reset or closed; the client sends no more."""


class HttpListener:
    """The part that all connections of one listening socket share.

    ``targets``: the endpoints of inference, whose plain requests do not come to the router.

    Attribute ``receive``: where bytes that have no other place yet are received: each connection
    uses it up before it lets go of the event loop.
    """

    def __init__(
        self,
        router: Router,
        settings: HttpSettings,
        workers: Workers,
        budget: Budget,
        targets: InferTargets | None = None,
    ) -> None:
        self.router = router
        self.targets = InferTargets() if targets is None else targets
        self.settings = settings
        self.budget = budget
        self.receive = bytearray(_RECEIVE_BYTES)
        self.idle = IdleConnections()
        self.coded = CodedBodies(settings.body_limit, workers)


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection."""

    def __init__(self, listener: HttpListener, connections: set[HttpConnection]) -> None:
        self._listener = listener
        self._settings = listener.settings
        self._connections = connections
        self._transport: asyncio.Transport
        self._route = listener.router.route
        self._watch = Watch(self._settings.connections)
        self._account = Account(lambda: self.unsent)
        self._lingering = False
        self._closing = False
        state = self._state = HttpConnectionState(
            self,
            listener.receive,
            listener.idle,
            listener.targets,
            self._settings.body_limit,
            _PIPELINE_LIMIT,
            _HELD_LIMIT,
        )
        # asyncio calls these for every read: no detour.
        self.get_buffer = state.get_buffer  # type: ignore[method-assign, assignment]
        self.buffer_updated = state.buffer_updated  # type: ignore[method-assign, assignment]

    # -- what asyncio calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start, unless there are too many already and none of them is idle."""
        self._transport = transport  # type: ignore[assignment]
        most = self._settings.connections.max_connections
        crowded = 0 < most <= len(self._connections) and not self._close_idle()
        self._connections.add(self)
        self._state.start(self._transport.write, self._transport.writelines)
        if not crowded:
            return
        if len(self._connections) > most + _TOLD_OF_TOO_MANY:
            self.abort()
            return
        self._refuse(
            503,
            f"the server has {most} connections open, which is the most it takes "
            "(--http-max-connections), and none of them is idle: try again later",
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self._closing = True
        self._state.lose()
        self._account.close()

    def eof_received(self) -> bool:
        """The client sends no more: answer what is asked, then close."""
        self._state.end()
        return self._state.open > 0 and not self._closing

    def pause_writing(self) -> None:
        """The client reads too slowly: read no more from it."""
        self._state.set_stalled(True)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._state.set_stalled(False)

    # -- what the server asks --------------------------------------------------------------------

    def drain(self) -> None:
        """Answer what is asked already, then close."""
        self._state.drain()
        if self._lingering and not self._state.headed:
            self._transport.close()

    def finish(self) -> None:
        """Refuse the request that is on its way: it could not be answered any more."""
        if self._state.progress()[0] != Stage.NOTHING:
            self._refuse(503, "the server is stopping")

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._state.close()
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes of answers that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """Close if the client takes too long with anything."""
        state, watch = self._state, self._watch
        unsent = self.unsent
        if watch.stuck(now, unsent, closing=self._closing):
            self.abort()
        elif not self._closing:
            idle = not state.open and not unsent
            progress = state.progress()
            late = watch.late(now, progress, state.placed, idle=idle)
            limits = self._settings.connections
            if late is Late.HEAD:
                seconds = limits.header_timeout
                self._refuse(408, f"expected the whole head of a request within {seconds:g} s")
            elif late is Late.BODY:
                seconds = limits.body_timeout
                least = bytes_per_second(progress[2])
                self._refuse(
                    408,
                    f"expected {least} bytes a second of the request's body within {seconds:g} s, "
                    "or its end",
                )
            elif late is Late.IDLE:
                self._close()
            if state.open and (state.deaf or not state.reading):
                self._look_for_client()

    def _look_for_client(self) -> None:
        """Abort if the client is gone, which the event loop does not tell while nothing is read.

        A client that closes its connection and one that ends only its half of it send the same, a
        FIN. They differ in what they make of bytes that come after it: the closed one resets.
        """
        sock = self._transport.get_extra_info("socket")
        tcp = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if tcp == _TCP_CLOSED:
            self.abort()
        elif tcp == _TCP_CLOSE_WAIT and not self.unsent:
            self._state.probe()

    # -- what the protocol asks --------------------------------------------------------------------

    def take(self, exchange: HttpExchange) -> None:
        """Find who takes a request whose head is there, and where its body goes."""
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
            # Also a bug: it fails this request, and the connection goes on.
            exchange.fail(error)
            return
        if exchange.whole:
            assert length is not None
            self.complete(exchange, length)

    def _receive_large(self, exchange: HttpExchange, handler: RequestHandler, length: int) -> None:
        """Have a body received whose memory counts as it comes."""
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
        """Return what a large body is charged to, which is refused when others need its memory."""
        return Body(self._listener.budget, self._account, exchange.give_up)

    def grow(self, exchange: HttpExchange, arrived: int) -> int:
        """Return how much of a body may be received, of which so much has come; 0 to refuse it."""
        handler: RequestHandler = exchange.handler
        try:
            return handler.grow(arrived)
        except Exception as error:
            exchange.give_up(error)
            return 0

    def complete(self, exchange: HttpExchange, copied: int) -> None:
        """Give a request that is whole to its handler."""
        handler = exchange.handler
        assert handler is not None
        try:
            handler.complete(exchange, copied)
        except Exception as error:
            exchange.give_up(error)

    def collect(self, exchange: HttpExchange, body: bytearray) -> None:
        """Give a request to its handler whose body came in chunks, or has a coding."""
        self._listener.coded.unpack(exchange, body, self.complete)

    def pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        body: bytes,
        buffers: Sequence[bytes | memoryview],
    ) -> None:
        """Answer with a coding that the client accepts."""
        self._listener.coded.pack(exchange, status, fields, [body, *buffers])

    def failure(self, error: Exception, status: int | None) -> tuple[int, Pieces]:
        """Return status and JSON body that tell an error."""
        return self._listener.router.failure(request_error(error), status)

    def refuse(self, fault: int, exchange: HttpExchange | None) -> None:
        """Refuse what the client sends, by the number of the fault."""
        if fault == Fault.BODY_TOO_LONG and exchange is not None:
            told = (exchange.field(b"content-length") or b"").decode("latin-1")
            self._refuse(413, self._settings.too_long(f"of {told} bytes"))
        elif fault == Fault.CHUNKS_TOO_LONG:
            self._refuse(413, self._settings.too_long("in chunks"))
        else:
            self._refuse(*FAULTS[fault])

    def changed(self, close: bool) -> None:
        """Read or not, as the state says, or close."""
        if close:
            self._close()
        elif not self._state.reading:
            self._transport.pause_reading()
        elif self._state.behind:
            # Later: this may be called while somebody uses what is received.
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._transport.resume_reading()

    def _go_on(self) -> None:
        """Take what had come already, then read again."""
        self._state.go_on()
        if self._state.reading and not self._closing:
            self._transport.resume_reading()

    # -- how it ends --------------------------------------------------------------------------------

    def _refuse(self, status: int, text: str) -> None:
        """Answer what cannot be read, after the answers before it; nothing after it is read."""
        self._state.refuse(invalid(text), status)

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest; returns whether there was one."""
        connection = longest_idle(self._listener.idle)
        if connection is None:
            return False
        self._connections.discard(connection)
        connection._close()
        return True

    def _close(self) -> None:
        may_send = self._state.close()
        if may_send and not self._closing:
            # The client may still be sending. A close now would make the kernel reset the connection
            # and the client lose its answer: what comes is dropped until the client closes, too.
            self._closing = self._lingering = True
            self._transport.write_eof()
        else:
            self._closing = True
            self._transport.close()
