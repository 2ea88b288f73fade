"""TLS of one connection: a protocol to the event loop, a transport to the connection's own protocol.

It differs from asyncio's TLS in what a server with many clients needs: handshakes run in worker
threads and count as connections; large responses are encrypted in pieces, each after the previous one
has been written; the number of unsent bytes is known; and each direction can be closed separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpubridge.config import TlsSettings
from gpubridge.config.files import read_regular
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.connection_limits import Room, room_for

_RECEIVE_BYTES = 1 << 18
"""Bytes that a connection receives and decrypts in one turn of the event loop."""
_SEND_BYTES = 1 << 16
"""Bytes that it encrypts in one turn: with four times as many, others wait twice as long."""
_CHUNK_BYTES = 1 << 15
"""Bytes passed to OpenSSL at once: its buffers never shrink."""
_HIGH_WATER = 1 << 16
_HANDSHAKES_BEYOND = 64
"""Handshakes in progress that are allowed above the limit of connections."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"

_logger = logging.getLogger(__name__)


class TlsListener:
    """State shared by all connections of one listening socket.

    - ``read_context``: reads the certificates; raises BridgeError.
    - ``most``: the limit of connections; 0 for none.
    - ``seconds``: the time limit of a handshake; 0 for none.
    - ``plain_answer``: sent to a client that speaks HTTP/1.1 without TLS.

    Attributes: ``context`` is for new connections; ``connections`` have finished their handshake,
    ``handshakes``, oldest first, have not; ``receive`` is the receive buffer, consumed at once.
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
        self.receive = memoryview(bytearray(_RECEIVE_BYTES))
        # A pool of its own, so that handshakes and long tasks do not delay each other.
        self.workers = Workers()
        self.workers.begin()
        self._read_context = read_context
        self._most = most

    def reload(self) -> None:
        """Reload the certificates for new connections; on errors the old ones stay."""
        self.workers.run(self._read_context, self._reloaded)

    def _reloaded(self, outcome: ssl.SSLContext | BridgeError) -> None:
        if isinstance(outcome, BridgeError):
            _logger.error("SIGHUP: the certificates stay as they are: %s", outcome.message)
        else:
            self.context = outcome

    def admit(self, connection: TlsConnection) -> None:
        """Add a connection that begins its handshake; at the limit, abort the oldest handshake."""
        self.handshakes[connection] = None
        count = len(self.connections) + len(self.handshakes)
        if room_for(connection.get_extra_info("socket"), count) is Room.NONE:
            connection.abort()
            return
        full = 0 < self._most < count
        if full and len(self.handshakes) > _HANDSHAKES_BEYOND:
            next(iter(self.handshakes)).abort()

    def close(self) -> None:
        """Abort all handshakes."""
        for connection in list(self.handshakes):
            connection.abort()
        self.workers.close()


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """A TLS connection; ``make`` returns its protocol after the handshake."""

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
        # Bytes to encrypt; whether the socket is full; whether the next turn is scheduled.
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._blocked = self._turn_due = False
        self._high, self._low = _HIGH_WATER, _HIGH_WATER // 4
        self._writing_paused = False
        # Whether the protocol reads, and the socket; whether the client has closed its sending side,
        # and the protocol was told.
        self._reading = self._receiving = True
        self._ended = self._eof_passed = False
        # Whether to close for sending once all is sent; both directions; close_notify sent; closed.
        self._finishing = self._leaving = self._notified = self._closed = False

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._socket = transport  # type: ignore[assignment]
        # pause_writing is called for every unsent byte: nothing is encrypted until it is written.
        self._socket.set_write_buffer_limits(high=0)
        self._listener.admit(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the receive buffer."""
        return self._listener.receive

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes."""
        if self._finishing or self._closed:
            # Read and dropped: the kernel resets a connection that is closed with unread bytes.
            return
        received = self._listener.receive[:nbytes]
        if self._protocol is None:
            self._incoming.write(received)
            self._handshake()
            return
        if nbytes == _RECEIVE_BYTES:
            # asyncio would read more at once: other connections get their turn first.
            self._receive(False)
            self._loop.call_soon(self._receive, True)
        elif not self._reading:
            self._receive(False)
        for at in range(0, nbytes, _CHUNK_BYTES):
            self._incoming.write(received[at : at + _CHUNK_BYTES])
            self._read()

    def eof_received(self) -> bool:
        """Pass on that the client has closed its sending side."""
        self._ended = True
        if self._protocol is None:
            return False
        self._read()
        return True

    def pause_writing(self) -> None:
        """Stop encrypting: the socket is full."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Continue encrypting."""
        self._blocked = False
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the connection is closed."""
        self._listener.handshakes.pop(self, None)
        self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    # -- the handshake ---------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Abort a handshake that takes too long."""
        if 0 < self._listener.seconds < now - self._begun:
            self.abort()

    def _handshake(self) -> None:
        """Continue the handshake in a worker: a signature takes as long as many requests."""
        self._receive(False)
        self._listener.workers.run(self._compute_handshake, self._handshake_done)

    def _compute_handshake(self) -> ssl.SSLError | None:
        try:
            self._tls.do_handshake()
        except ssl.SSLError as error:
            return error.with_traceback(None)
        return None

    def _handshake_done(self, outcome: ssl.SSLError | BridgeError | None) -> None:
        if self._closed:
            return
        self._write_outgoing()
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
        """Pass no more bytes to the protocol."""
        self._reading = False

    def resume_reading(self) -> None:
        """Continue in a later turn of the event loop: the protocol may not be reentrant."""
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._receive(True)
        self._read()

    def _receive(self, on: bool) -> None:
        """Resume or pause reading of the socket; no resume while the protocol has paused."""
        if on == self._receiving or self._closed or (on and not self._reading):
            return
        self._receiving = on
        if on:
            self._socket.resume_reading()
        else:
            self._socket.pause_reading()

    def _read(self) -> None:
        """Decrypt received bytes into the protocol's memory, and pass on the end of input."""
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
            self._write_outgoing()
            self._fail(error)
            return
        if self._closed:
            return
        self._write_outgoing()
        if self._ended and self._reading and not self._eof_passed:
            self._eof_passed = True
            if not protocol.eof_received():
                self.close()

    def _decrypt(self, buffer: Any) -> int:
        """Decrypt into a buffer; return the number of bytes."""
        tls, incoming = self._tls, self._incoming
        nbytes, size, view = 0, len(buffer), memoryview(buffer)
        try:
            # A read returns at most one record, and raises an exception, which is slow, if there is none.
            while nbytes < size and (incoming.pending or tls.pending()):
                # Typed as bytes, but an int with a buffer.
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
        """Send the bytes of several buffers, which must not change until they are sent."""
        if self._finishing or self._closed:
            return
        for data in list_of_data:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
        self._send()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the unsent bytes at which the protocol is paused and resumed."""
        self._high = _HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes not yet written to the socket."""
        return self._unsent_bytes + self._socket.get_write_buffer_size()

    def write_eof(self) -> None:
        """Close the sending side once all is sent; drop received bytes from then on."""
        self._finishing = True
        self._send()

    def can_write_eof(self) -> bool:
        """Return True: each direction can be closed separately."""
        return True

    def _send(self) -> None:
        """Encrypt and write a piece if the socket has written the last one; pause, resume or close."""
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
        if size > self._high and not self._writing_paused:
            self._writing_paused = True
            protocol.pause_writing()
        elif size <= self._low and self._writing_paused:
            self._writing_paused = False
            protocol.resume_writing()

    def _next_turn(self) -> None:
        self._turn_due = False
        self._send()

    def _encrypt(self) -> None:
        """Encrypt and write the bytes of one turn."""
        sealed = []
        left = _SEND_BYTES
        while self._unsent and left:
            chunk = self._take_chunk()
            left -= len(chunk)
            self._tls.write(chunk)
            sealed.append(self._outgoing.read())
        self._unsent_bytes -= _SEND_BYTES - left
        self._socket.writelines(sealed)

    def _take_chunk(self) -> bytes | memoryview:
        """Remove some unsent bytes; short buffers are joined into one record."""
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

    def _write_outgoing(self) -> None:
        """Write the pending output of OpenSSL."""
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    # -- closing ---------------------------------------------------------------------------------

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
        """Return whether the connection is closing or closed."""
        return self._leaving or self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the TLS object as ``ssl_object``, or information about the socket."""
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)

    def _finish(self) -> None:
        """Send close_notify, then close the socket or its sending side."""
        if not self._notified:
            self._notified = True
            # Raises because the client has not sent close_notify.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._write_outgoing()
            if not self._leaving:
                self._receive(True)
                self._socket.write_eof()
        if self._leaving:
            self._closed = True
            self._socket.close()


def read_context(settings: TlsSettings, protocol: str) -> ssl.SSLContext:
    """Read an endpoint's certificates; ``protocol`` is the ALPN name that its clients speak.

    Raises BridgeError that names the wrong file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    cert = _check_file(settings, "server_cert", _CERTIFICATE, "certificate")
    key = _check_file(settings, "server_key", _KEY, "private key")

    def refuse_password() -> str:
        raise invalid(f"{key} is encrypted: expected a key without a password")

    try:
        context.load_cert_chain(settings.server_cert, settings.server_key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise invalid(f"{key} is not the key of {cert}") from error
        raise invalid(f"{cert} and {key} cannot be used: {_reason(error)}") from error
    if settings.use_ssl_mutual:
        root = _check_file(settings, "root_cert", _CERTIFICATE, "certificate")
        try:
            context.load_verify_locations(settings.root_cert)
        except ssl.SSLError as error:
            raise invalid(f"{root} cannot be used: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_file(settings: TlsSettings, field: str, mark: bytes, what: str) -> str:
    """Check that a file is readable and contains ``mark``; return its name for errors."""
    path = getattr(settings, field)
    name = f"{settings.flag_name(field)}={path}"
    try:
        content = read_regular(Path(path))
    except OSError as error:
        raise invalid(f"{name} cannot be read: {error.strerror or error}") from error
    if mark not in content:
        raise invalid(f"{name} holds no {what}: expected PEM")
    return name


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
