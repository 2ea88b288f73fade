"""The peer that the tests of HTTP/2 use, and how a connection begins and ends."""

import struct

import pytest

from gpubridge.dataplane import GrpcMethods, HeaderFields, Http2Connection, Http2Limits
from gpubridge.frontend.grpc import connection as events_of
from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode, encode_headers

REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/service/method"),
    (b":authority", b"here"),
)
BLOCK = encode_headers(REQUEST)
OK = HeaderFields([(b":status", b"200")])
OK_BLOCK = b"\x88"
DONE = HeaderFields([(b"grpc-status", b"0")])
DONE_BLOCK = b"\x00\x0bgrpc-status\x010"
NAMES = {value: name.lower() for name, value in vars(events_of).items() if name.isupper()}


class Recorder:
    """Writes down what a connection tells, of streams that are no calls of gRPC."""

    def __init__(self):
        self.events = []
        self.bodies = {}
        self.ended = set()

    def take(self, events):
        for kind, stream_id, *said in events:
            name = NAMES[kind]
            if kind == events_of.BEGIN:
                _, headers, end = said
                self.on_headers(stream_id, headers, end)
            elif kind == events_of.DATA:
                self.on_data(stream_id, *said)
            elif kind == events_of.FILLED:
                self.on_filled(stream_id, *said)
            elif kind == events_of.WRITABLE:
                self.on_writable(stream_id)
            elif kind == events_of.RESET:
                self.events.append((name, stream_id, *said))
            elif kind != events_of.PING:
                self.events.append((name, *said))

    def on_headers(self, stream_id, headers, end):
        self.events.append(("headers", stream_id, headers.path))
        self.bodies[stream_id] = b""
        if end:
            self.ended.add(stream_id)

    def on_data(self, stream_id, view, end):
        assert stream_id not in self.ended
        self.bodies[stream_id] += view
        if end:
            self.ended.add(stream_id)

    def on_filled(self, stream_id, end):
        self.events.append(("filled", stream_id, end))
        if end:
            self.ended.add(stream_id)

    def on_writable(self, stream_id):
        self.events.append(("writable", stream_id))

    @property
    def fault(self):
        """The code with which the connection was closed, if it was."""
        return next((event[1] for event in self.events if event[0] == "closed"), None)


class Server:
    """A connection, its recorder, a clock that stands still, and bytes instead of a socket."""

    def __init__(self, recorder=None, *, started=True, methods=(), **limits):
        self.recorder = recorder or Recorder()
        self.now = 0.0
        changed = Http2Limits()
        for name, value in limits.items():
            setattr(changed, name, value)
        self.connection = Http2Connection(GrpcMethods(methods), changed)
        if started:
            self.feed(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
            self.frames()

    def feed(self, data, chunk=1 << 30):
        """Receive bytes, in pieces of at most ``chunk``."""
        data = memoryview(data)
        while data:
            memory = self.connection.memory()
            assert len(memory)
            size = min(len(memory), len(data), chunk)
            memory[:size] = data[:size]
            self.recorder.take(self.connection.received(size, self.now))
            data = data[size:]

    def output(self):
        """Take all output there is, as bytes."""
        taken = []
        while outcome := self.connection.flush(-1):
            left, events, _ = outcome
            self.recorder.take(events)
            if not left and not events:
                break
            taken += [bytes(part) for part in left]
        return b"".join(taken)

    def frames(self):
        """Take all output, as frames."""
        return split(self.output())

    def open(self, stream_id, *, end=False, block=BLOCK):
        """Begin a request."""
        self.feed(headers(stream_id, end=end, block=block))


def split(data):
    """Split bytes into frames of type, flags, stream id and payload."""
    found, start = [], 0
    while start < len(data):
        word, flags, stream_id = frames.unpack_header(data, start)
        stop = start + 9 + (word >> 8)
        assert len(data) >= stop
        found.append((word & 0xFF, flags, stream_id, data[start + 9 : stop]))
        start = stop
    return found


def headers(stream_id, *, end=False, block=BLOCK):
    return frames.frame(frames.HEADERS, 4 | end, stream_id, block)


def data(stream_id, payload, *, end=False):
    return frames.frame(frames.DATA, int(end), stream_id, payload)


def settings(*pairs):
    return frames.frame(frames.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *p) for p in pairs))


def test_it_begins_with_settings_and_a_wide_window():
    server = Server(started=False, max_concurrent_streams=7, stream_window=1 << 20)
    (kind, _, _, payload), update = server.frames()
    assert kind == frames.SETTINGS
    assert dict(struct.iter_unpack(">HI", payload)) == {3: 7, 4: 1 << 20, 5: 1 << 22, 6: 1 << 14}
    assert update[0] == frames.WINDOW_UPDATE
    assert int.from_bytes(update[3], "big") == (1 << 26) - 65535


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
        b"P",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
        frames.PREFACE + frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.PREFACE + frames.frame(frames.SETTINGS, 1, 0),
    ],
)
def test_other_protocols_are_sent_away(first):
    server = Server(started=False)
    server.frames()
    server.feed(first)
    if first == b"P":
        assert not server.connection.closed
        return
    assert server.connection.closed
    assert server.recorder.fault == Http2ErrorCode.PROTOCOL_ERROR
    ((kind, _, _, payload),) = server.frames()
    assert kind == frames.GOAWAY
    assert payload[:8] == struct.pack(">II", 0, 1)
    assert payload[8:].startswith(b"expected ")
    server.feed(b"more" * 100_000)
    assert server.frames() == []


def test_draining_lets_streams_come_until_the_peer_knows():
    server = Server()
    server.open(1, end=True)
    server.connection.drain()
    server.connection.drain()
    goaway, ping = server.frames()
    assert goaway[3] == struct.pack(">II", 0x7FFFFFFF, 0)
    server.open(3, end=True)
    server.feed(frames.frame(frames.PING, 1, 0, ping[3]))
    server.open(5, end=True)
    first, second = server.frames()
    assert first == (frames.GOAWAY, 0, 0, struct.pack(">II", 3, 0))
    assert second[:3] == (frames.RST_STREAM, 0, 5)
    for stream_id in (1, 3):
        assert not server.connection.closed
        server.connection.send_headers(stream_id, OK, end=True)
    assert server.connection.closed
    assert [event[2] for event in server.frames()] == [1, 3]
    assert server.recorder.events[-1] == ("closed", Http2ErrorCode.NO_ERROR, "")


def test_pings_of_ours_are_answered_and_told():
    server = Server()
    server.connection.ping(b"abcdefgh")
    assert server.frames() == [(frames.PING, 0, 0, b"abcdefgh")]
    server.feed(frames.frame(frames.PING, 1, 0, b"abcdefgh"))
    assert server.recorder.events == [("pong", b"abcdefgh")]


def test_a_lost_socket_forgets_everything():
    server = Server()
    server.open(1)
    body = bytearray(1 << 20)
    server.connection.send_data(1, [memoryview(body)])
    server.connection.lost()
    body.clear()  # refused while a view of it is held
    assert server.connection.closed
    assert server.connection.open_streams == 0
