"""TLS between a socket and a protocol: pieces, pauses, ends; the client's side is OpenSSL's."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest

from gpubridge.frontend.tls_connection import TlsConnection, TlsListener
from tests.waits import until

PIECE, RECEIVED = 1 << 16, 1 << 18
OVERHEAD = 1 << 13
LONG = bytes(range(256)) * (1 << 12)


class Socket:
    """The transport of a socket: what is sent, and how it stands; a full one takes nothing."""

    def __init__(self):
        self.sent = bytearray()
        self.queued = bytearray()
        self.full = False
        self.reading = True
        self.ended = self.closed = False
        self.protocol: TlsConnection

    def set_write_buffer_limits(self, high):
        assert high == 0

    def write(self, data):
        assert not self.ended
        if not self.full:
            self.sent += data
            return
        self.queued += data
        self.protocol.pause_writing()

    def writelines(self, parts):
        self.write(b"".join(parts))

    def take(self):
        self.sent += self.queued
        self.queued.clear()
        self.protocol.resume_writing()

    def get_write_buffer_size(self):
        return len(self.queued)

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def write_eof(self):
        self.ended = True

    def close(self):
        self.closed = True

    def get_extra_info(self, name, default=None):
        return self if name == "socket" else default

    def fileno(self):
        return 3


class Protocol(asyncio.BufferedProtocol):
    """Protocol above TLS: receives into a small buffer, and answers nothing by itself."""

    def __init__(self):
        self.received = bytearray()
        self.events: list[str] = []
        self.pause_at: int | None = None
        self.keep_open = False
        self._buffer = bytearray(1000)

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return self._buffer

    def buffer_updated(self, nbytes):
        self.received += self._buffer[:nbytes]
        if self.pause_at is not None and len(self.received) >= self.pause_at:
            self.transport.pause_reading()

    def eof_received(self):
        self.events.append("eof")
        return self.keep_open

    def pause_writing(self):
        self.events.append("pause")

    def resume_writing(self):
        self.events.append("resume")


class Pair:
    """A connection whose handshake is done, and its client."""

    def __init__(self, contexts):
        server, client = contexts
        self.listener = TlsListener(lambda: server, most=0, seconds=0)
        self.protocol, self.socket = Protocol(), Socket()
        self.tls = self.socket.protocol = TlsConnection(self.listener, lambda: self.protocol)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    async def shake_hands(self):
        self.tls.connection_made(self.socket)
        while self.listener.handshakes:
            try:
                self.client.do_handshake()
            except ssl.SSLWantReadError:
                pass
            self.send_raw(self.outgoing.read())
            # A worker computes the answer.
            await until(lambda: self.socket.sent or not self.listener.handshakes)
            self.incoming.write(self.take_sent())

    def take_sent(self):
        sent = bytes(self.socket.sent)
        self.socket.sent.clear()
        return sent

    def send_raw(self, data):
        """Hand it over as the event loop does: not while nothing is read."""
        while data and self.socket.reading:
            buffer = self.tls.get_buffer(-1)
            nbytes = min(len(buffer), len(data))
            buffer[:nbytes] = data[:nbytes]
            data = data[nbytes:]
            self.tls.buffer_updated(nbytes)
        self.left = data

    def send(self, data):
        self.client.write(data)
        self.send_raw(self.outgoing.read())

    def read(self):
        """Return the bytes that the client has received; ends where nothing more has come."""
        self.incoming.write(self.take_sent())
        data = b""
        try:
            while part := self.client.read(1 << 16):
                data += part
        except ssl.SSLWantReadError:
            return data
        except ssl.SSLZeroReturnError:
            pass
        return data + b"END"


@pytest.fixture(scope="module")
def contexts():
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


@pytest.fixture
@asynccontextmanager
async def pair(contexts):
    pair = Pair(contexts)
    await pair.shake_hands()
    yield pair
    pair.listener.close()


async def turns(count=100):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_long_answer_is_encrypted_in_pieces(pair):
    pair.tls.writelines([b"head", LONG[:1000], memoryview(LONG)[1000:]])
    for sent in range(1, 4):
        assert sent * PIECE <= len(pair.socket.sent) <= sent * (PIECE + OVERHEAD)
        assert pair.tls.get_write_buffer_size() == len(LONG) + 4 - sent * PIECE
        await asyncio.sleep(0)
    assert pair.protocol.events == ["pause"]
    await turns()
    assert pair.read() == b"head" + LONG
    assert pair.protocol.events == ["pause", "resume"]
    assert pair.tls.get_write_buffer_size() == 0


async def test_nothing_is_encrypted_for_a_socket_that_takes_nothing(pair):
    pair.socket.full = True
    pair.tls.write(LONG)
    await turns()
    assert len(pair.socket.queued) <= PIECE + OVERHEAD
    assert pair.tls.get_write_buffer_size() >= len(LONG)
    pair.socket.full = False
    pair.socket.take()
    await turns()
    assert pair.read() == LONG


async def test_a_protocol_that_pauses_gets_nothing_more(pair):
    pair.protocol.pause_at = 3000
    pair.send(LONG)
    await turns()
    assert len(pair.protocol.received) == 3000
    assert pair.left
    assert not pair.socket.reading
    pair.tls.eof_received()
    pair.protocol.pause_at = None
    assert pair.protocol.events == []
    pair.tls.resume_reading()
    await turns()
    assert pair.protocol.received == LONG[: len(pair.protocol.received)]
    assert len(pair.protocol.received) > RECEIVED // 2
    # It hears of the end behind all that had come.
    assert pair.protocol.events == ["eof"]
    assert pair.socket.closed


async def test_others_get_their_turn_while_much_is_received(pair):
    pair.send(LONG)
    assert not pair.socket.reading
    assert RECEIVED // 2 < len(pair.protocol.received) <= RECEIVED
    while pair.left:
        await asyncio.sleep(0)
        assert pair.socket.reading
        pair.send_raw(pair.left)
    await turns()
    assert pair.protocol.received == LONG


async def test_an_end_of_one_direction_is_told_and_the_other_dropped(pair):
    pair.tls.write(LONG)
    pair.tls.write_eof()
    assert not pair.socket.ended
    await turns()
    assert pair.read() == LONG + b"END"
    assert pair.socket.ended
    pair.send(b"late")
    assert not pair.protocol.received
    assert not pair.socket.closed
    pair.tls.eof_received()
    assert pair.protocol.events[-1] == "eof"
    assert pair.socket.closed


async def test_a_close_waits_for_what_is_unsent(pair):
    pair.tls.write(LONG)
    pair.tls.close()
    assert pair.tls.is_closing()
    assert not pair.socket.closed
    pair.tls.write(b"late")
    await turns()
    assert pair.socket.closed
    assert pair.read() == LONG + b"END"


async def test_answers_after_the_clients_end(pair):
    pair.protocol.keep_open = True
    pair.client.write(b"question")
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.send_raw(pair.outgoing.read())
    assert pair.protocol.received == b"question"
    assert pair.protocol.events == ["eof"]
    assert not pair.socket.closed
    pair.tls.write(b"answer")
    sent = len(pair.socket.sent)
    assert sent > len(b"answer")
    pair.tls.close()
    assert pair.socket.closed
