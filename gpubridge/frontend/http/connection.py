"""One HTTP/1.1 connection: what asyncio calls, when to read, answers in order, how it ends."""

from __future__ import annotations

import asyncio
import socket

from gpubridge.frontend.http.answer import AnswerQueue
from gpubridge.frontend.http.message import HttpSettings, Router
from gpubridge.frontend.http.reading import RequestReader
from gpubridge.frontend.http.watch import NO_PROGRESS, Late, Stage, Watch

__all__ = ["HttpConnection", "HttpSettings"]

_TOLD_OF_TOO_MANY = 64
"""Connections over the limit that are told so before they are closed; more are just closed."""
_TCP_CLOSED = 7
_TCP_CLOSE_WAIT = 8
"""The kernel's numbers of states of a connection: reset or closed; the client sends no more."""


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection.

    Parameters
    ----------
    router : Router
        Finds handlers.
    receive : bytearray
        Where bytes that have no other place yet are received; see `RequestReader`.
    connections : set
        Holds this connection for as long as it is open.
    """

    def __init__(
        self,
        router: Router,
        settings: HttpSettings,
        receive: bytearray,
        connections: set[HttpConnection],
    ) -> None:
        self._settings = settings
        self._connections = connections
        self._transport: asyncio.Transport
        self._answers = AnswerQueue(router, self.answered)
        self._reader = RequestReader(router, settings, receive, self._answers, self)
        self._watch = Watch(settings.connections)
        self._closing = False
        self._paused = self._stalled = False
        # asyncio calls these for every read: no detour.
        self.get_buffer = self._reader.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = self._reader.buffer_updated  # type: ignore[method-assign]

    # -- what asyncio calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start, unless there are too many already."""
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        most = self._settings.connections.max_connections
        if most and len(self._connections) > most:
            if len(self._connections) > most + _TOLD_OF_TOO_MANY:
                self.abort()
                return
            self._reader.refuse(
                503,
                f"the server has {most} connections open, which is the most it takes "
                "(--http-max-connections): try again later",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is not finished."""
        self._connections.discard(self)
        self._closing = True
        self._reader.lose()
        self._answers.abort()

    def eof_received(self) -> bool:
        """The client sends no more: answer what is asked, then close."""
        self._reader.end()
        return bool(self._answers) and not self._closing

    def pause_writing(self) -> None:
        """The client reads too slowly: read no more from it."""
        self._stalled = True
        self.update_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stalled = False
        self.update_reading()
        self._answers.client_reads()

    # -- what the server asks --------------------------------------------------------------------

    def drain(self) -> None:
        """Answer what is asked already, then close."""
        self._reader.last = True
        self.close_when_done()

    def finish(self) -> None:
        """Refuse the request that is on its way: it could not be answered any more."""
        if self._reader.progress()[0] is not Stage.NOTHING:
            self._reader.refuse(503, "the server is stopping")

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes of answers that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """Close if the client takes too long with anything."""
        reader, watch = self._reader, self._watch
        unsent = self.unsent
        if watch.stuck(now, unsent, closing=self._closing):
            self.abort()
        elif not self._closing:
            # While we do not read, nothing of a request that is on its way is late.
            progress = NO_PROGRESS if self._paused else reader.progress()
            idle = not self._answers and not unsent
            late = watch.late(now, progress, self._answers.placed, idle=idle)
            limits = self._settings.connections
            if late is Late.HEAD:
                seconds = limits.header_timeout
                reader.refuse(408, f"expected the whole head of a request within {seconds:g} s")
            elif late is Late.BODY:
                seconds = limits.body_timeout
                reader.refuse(
                    408,
                    f"expected 500 bytes a second of the request's body within {seconds:g} s, "
                    "or its end",
                )
            elif late is Late.IDLE:
                self._close()
            if self._answers and (self._paused or reader.deaf):
                self._look_for_client()

    def _look_for_client(self) -> None:
        """Abort if the client is gone, which the event loop does not tell while nothing is read.

        A client that closes its connection and one that ends only its half of it send the same, a
        FIN. They differ in what they make of bytes that come after it: the closed one resets.
        """
        sock = self._transport.get_extra_info("socket")
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _TCP_CLOSED:
            self.abort()
        elif state == _TCP_CLOSE_WAIT and not self.unsent:
            probe = self._answers.probe()
            if probe:
                self._transport.write(probe)

    # -- what the reader asks --------------------------------------------------------------------

    def tell(self, interim: bytes) -> None:
        """Send an interim answer."""
        self._transport.write(interim)

    def update_reading(self) -> None:
        """Read, unless the client is behind or has asked enough."""
        wanted = not self._stalled and not self._answers.full
        if wanted == self._paused and not self._closing:
            self._paused = self._reader.crowded = not wanted
            if not wanted:
                self._transport.pause_reading()
            elif self._reader.behind:
                # Later: this may be called while somebody uses what is received.
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                self._transport.resume_reading()

    def _go_on(self) -> None:
        """Take what had come already, then read again."""
        self._reader.go_on()
        if not self._paused and not self._closing:
            self._transport.resume_reading()

    def close_when_done(self) -> None:
        """Close if no more is read and nothing is left to be answered."""
        if self._reader.last and not self._answers and not self._reader.headed:
            self._close()

    # -- answers ----------------------------------------------------------------------------------

    def answered(self) -> None:
        """An answer is there: send those whose turn it is."""
        answers = self._answers
        was_full = answers.full
        while not self._closing:
            answer = answers.take_ready()
            if answer is None:
                break
            parts = answer.take_parts()
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.writelines(parts)
            if answer.unfinished and not self._stalled:
                answers.client_reads()
            elif answer.close and not answer.unfinished:
                self._close()
                return
        if was_full:
            self.update_reading()
        if self._reader.last:
            self.close_when_done()

    def _close(self) -> None:
        reader = self._reader
        reader.deaf = True
        if (reader.unread or reader.headed) and not self._closing:
            # The client may still be sending. A close now would make the kernel reset the connection
            # and the client lose its answer: what comes is dropped until the client closes, too.
            self._closing = True
            self._transport.write_eof()
        else:
            self._closing = True
            self._transport.close()
