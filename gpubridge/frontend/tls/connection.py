"""TLS of one connection: to the event loop a protocol, to the connection's own protocol a transport.

It differs from asyncio's in what a server of many clients needs: handshakes are computed beside the
event loop and count as connections; large answers are encrypted in pieces, each when the socket has
taken the last one; what is unsent is known; and one direction can end before the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError

_TURN_BYTES = 1 << 18
"""Bytes that a connection encrypts, or receives, before the others get their turn."""
_CHUNK_BYTES = 1 << 15
"""Bytes that OpenSSL gets at once: a connection's buffers there keep the size that they once had."""
_HIGH_WATER = 1 << 16
_HANDSHAKES_BEYOND = 64
"""Handshakes under way that there may be beyond the limit of connections."""

_logger = logging.getLogger(__name__)


class TlsListener:
    """The part that all connections of one listening socket share.

    - ``read_context``: reads the certificates, also anew; raises BridgeError.
    - ``most``: how many connections there may be; 0 for any number.
    - ``seconds``: the time for a handshake; 0 for any.
    - ``plain_answer``: sent to a client that speaks HTTP/1.1 without TLS.

    Attributes: ``context`` is that of new connections; ``connections`` are those whose handshake is
    done, ``handshakes``, by age, those where it is under way; ``receive`` is where bytes are
    received, which are used up at once.
    """

    def __init__(
        self,
        read_context: Callable[[], ssl.SSLContext],
        *,
        most: int,
        seconds: float,
        plain_answer: bytes = b"",
    ) -> None:
        self.context = read_context()
        self.seconds = seconds
        self.plain_answer = plain_answer
        self.connections: set[Any] = set()
        self.handshakes: dict[TlsConnection, None] = {}
        self.receive = memoryview(bytearray(_TURN_BYTES))
        # Of its own: what others compute for long delays no handshake, nor they others.
        self.workers = Workers()
        self._read_context = read_context
        self._most = most

    def reload(self) -> None:
        """Read the certificates anew, for new connections; those that cannot be used change nothing."""
        self.workers.run(self._read_context, self._reloaded)

    def _reloaded(self, outcome: ssl.SSLContext | BridgeError) -> None:
        if isinstance(outcome, BridgeError):
            _logger.error("SIGHUP: the certificates stay as they are: %s", outcome.message)
        else:
            self.context = outcome

    def admit(self, connection: TlsConnection) -> None:
        """Add a connection whose handshake begins; where there are too many, the oldest ends."""
        self.handshakes[connection] = None
        crowded = 0 < self._most < len(self.connections) + len(self.handshakes)
        if crowded and len(self.handshakes) > _HANDSHAKES_BEYOND:
            next(iter(self.handshakes)).abort()

    def close(self) -> None:
        """End all handshakes."""
        for connection in list(self.handshakes):
            connection.abort()
        self.workers.close()


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """A client's connection through TLS; ``make`` makes its protocol when the handshake is done."""

    def __init__(self, listener: TlsListener, make: Callable[[], asyncio.BufferedProtocol]) -> None:
        super().__init__()
        self._listener = listener
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._socket: asyncio.Transport
        self._protocol: asyncio.BufferedProtocol | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = listener.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        # What is to be encrypted; whether it waits for the socket, or for its turn.
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._blocked = self._turn_due = False
        self._high, self._low = _HIGH_WATER, _HIGH_WATER // 4
        self._crowded = False
        # Whether the protocol reads, and the socket; whether the client sends no more, and the
        # protocol knows.
        self._reading = self._receiving = True
        self._ended = self._end_told = False
        # Whether it ends once all is sent, in both directions, has said so to the client; is closed.
        self._finishing = self._leaving = self._goodbye = self._closed = False

    # -- what asyncio calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client to begin the handshake."""
        self._socket = transport  # type: ignore[assignment]
        # Told of every byte that the socket does not take: until then nothing more is encrypted.
        self._socket.set_write_buffer_limits(high=0)
        self._listener.admit(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive."""
        return self._listener.receive

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was received."""
        if self._finishing or self._closed:
            # The kernel would reset a connection that closes with bytes unread.
            return
        received = self._listener.receive[:nbytes]
        if self._protocol is None:
            self._incoming.write(received)
            self._shake_hands()
            return
        if nbytes == _TURN_BYTES:
            # More may have come, which asyncio would read at once: others get their turn.
            self._receive(False)
            self._loop.call_soon(self._receive, True)
        elif not self._reading:
            self._receive(False)
        for at in range(0, nbytes, _CHUNK_BYTES):
            self._incoming.write(received[at : at + _CHUNK_BYTES])
            self._read()

    def eof_received(self) -> bool:
        """The client sends no more."""
        self._ended = True
        if self._protocol is None:
            return False
        self._read()
        return True

    def pause_writing(self) -> None:
        """The socket takes no more."""
        self._blocked = True

    def resume_writing(self) -> None:
        """The socket has taken all."""
        self._blocked = False
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol."""
        self._listener.handshakes.pop(self, None)
        self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    # -- the handshake ---------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End a handshake that takes too long."""
        if 0 < self._listener.seconds < now - self._begun:
            self.abort()

    def _shake_hands(self) -> None:
        """Go on with the handshake in a worker: signatures take as long as many requests."""
        self._receive(False)
        self._listener.workers.run(self._compute_handshake, self._shaken)

    def _compute_handshake(self) -> ssl.SSLError | None:
        try:
            self._tls.do_handshake()
        except ssl.SSLError as error:
            return error.with_traceback(None)
        return None

    def _shaken(self, outcome: ssl.SSLError | BridgeError | None) -> None:
        if self._closed:
            return
        self._pass_on()
        if isinstance(outcome, ssl.SSLWantReadError):
            self._receive(True)
            return
        self._listener.handshakes.pop(self, None)
        if outcome is None:
            self._protocol = self._make()
            self._protocol.connection_made(self)
            self._receive(True)
            self._read()
            return
        if getattr(outcome, "reason", None) == "HTTP_REQUEST":
            self._socket.write(self._listener.plain_answer)
        self._fail(outcome)

    def _fail(self, error: Exception) -> None:
        reason = getattr(error, "reason", None) or str(error)
        peer = self._socket.get_extra_info("peername")
        _logger.debug("TLS with %s failed: %s", peer, reason.lower().replace("_", " "))
        self._closed = True
        self._socket.close()

    # -- bytes in --------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Give the protocol nothing more."""
        self._reading = False

    def resume_reading(self) -> None:
        """Go on, in a later turn: the protocol may be in the midst of something."""
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._receive(True)
        self._read()

    def _receive(self, on: bool) -> None:
        """Have the socket read, or not; not while the protocol does not."""
        if on == self._receiving or self._closed or (on and not self._reading):
            return
        self._receiving = on
        if on:
            self._socket.resume_reading()
        else:
            self._socket.pause_reading()

    def _read(self) -> None:
        """Decrypt what has come into the protocol's memory; tell it when that was the last."""
        protocol = self._protocol
        if protocol is None:
            return
        try:
            while self._reading and not (self._finishing or self._closed):
                nbytes = self._decrypt(protocol.get_buffer(-1))
                if not nbytes:
                    break
                protocol.buffer_updated(nbytes)
        except ssl.SSLError as error:
            self._pass_on()
            self._fail(error)
            return
        if self._closed:
            return
        self._pass_on()
        if self._ended and self._reading and not self._end_told:
            self._end_told = True
            if not protocol.eof_received():
                self.close()

    def _decrypt(self, buffer: Any) -> int:
        """Fill a buffer as far as something has come; returns the number of bytes."""
        tls, incoming = self._tls, self._incoming
        nbytes, size, view = 0, len(buffer), memoryview(buffer)
        try:
            # A read gives one record at most, and raises, which takes longer, where there is none.
            while nbytes < size and (incoming.pending or tls.pending()):
                # Said to return bytes: those only without a buffer.
                count: Any = tls.read(size - nbytes, view[nbytes:] if nbytes else buffer)
                if not count:
                    self._ended = True
                    incoming.read()
                nbytes += count
        except ssl.SSLWantReadError:
            pass
        return nbytes

    # -- bytes out -------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send some bytes."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send the bytes of several buffers, which must not change before."""
        if self._finishing or self._closed:
            return
        for data in list_of_data:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
        self._send()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set how much may be unsent before the protocol is told, and told that it goes on."""
        self._high = _HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the socket has not taken yet."""
        return self._unsent_bytes + self._socket.get_write_buffer_size()

    def write_eof(self) -> None:
        """Send no more once all is sent; what comes from then on is dropped."""
        self._finishing = True
        self._send()

    def can_write_eof(self) -> bool:
        """Return that one direction can end before the other."""
        return True

    def _send(self) -> None:
        """Encrypt and send a piece, unless the last one is not taken yet; then see how it stands."""
        if self._closed or self._turn_due:
            return
        if self._unsent and not self._blocked:
            self._encrypt()
            if self._unsent and not self._blocked:
                self._turn_due = True
                self._loop.call_soon(self._next_turn)
        if self._finishing and not self._unsent:
            self._finish()
            return
        protocol, size = self._protocol, self.get_write_buffer_size()
        if protocol is None:
            return
        if size > self._high and not self._crowded:
            self._crowded = True
            protocol.pause_writing()
        elif size <= self._low and self._crowded:
            self._crowded = False
            protocol.resume_writing()

    def _next_turn(self) -> None:
        self._turn_due = False
        self._send()

    def _encrypt(self) -> None:
        """Encrypt what may go in one turn, and give it to the socket."""
        sealed = []
        left = _TURN_BYTES
        while self._unsent and left:
            chunk = self._take_chunk()
            left -= len(chunk)
            self._tls.write(chunk)
            sealed.append(self._outgoing.read())
        self._unsent_bytes -= _TURN_BYTES - left
        self._socket.writelines(sealed)

    def _take_chunk(self) -> bytes | memoryview:
        """Take some bytes from what is unsent; what is short shares a record with the next."""
        parts: list[bytes | memoryview] = []
        left = _CHUNK_BYTES
        while self._unsent and left:
            part = self._unsent.popleft()
            if len(part) > left:
                self._unsent.appendleft(memoryview(part)[left:])
                part = memoryview(part)[:left]
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pass_on(self) -> None:
        """Give the socket what OpenSSL has to say."""
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    # -- how it ends -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close once all is sent."""
        self._finishing = self._leaving = True
        self._send()

    def abort(self) -> None:
        """Close at once."""
        self._listener.handshakes.pop(self, None)
        self._closed = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """Return whether it was told to close, or has."""
        return self._leaving or self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of TLS as ``ssl_object``, or something of the socket."""
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)

    def _finish(self) -> None:
        """Tell the client that nothing more comes, as TLS does and then as TCP."""
        if not self._goodbye:
            self._goodbye = True
            # Raises because the client has not said it, too.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._pass_on()
            if not self._leaving:
                self._receive(True)
                self._socket.write_eof()
        if self._leaving:
            self._closed = True
            self._socket.close()
