"""Violations of HTTP/2 rules, and their kinds of errors (RFC 9113, sections 5 and 6)."""

import pytest

from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode as Code, encode_headers, frame
from tests.unit.test_http2_peer import BLOCK, OK, REQUEST, Server, data, headers, settings

# Stream 1 is open, 3 is half closed (remote), 5 was answered, 7 was reset by us, 9 by the peer.
ENDS_THE_CONNECTION = {
    "DATA on the connection": (data(0, b"x"), Code.PROTOCOL_ERROR),
    "DATA of an idle stream": (data(11, b"x"), Code.PROTOCOL_ERROR),
    "DATA of a finished stream": (data(5, b"x"), Code.STREAM_CLOSED),
    "DATA with too much padding": (frame(0, 8, 1, b"\4abc"), Code.PROTOCOL_ERROR),
    "DATA without its padding's length": (frame(0, 8, 1), Code.PROTOCOL_ERROR),
    "a frame that is too large": (frame(0, 0, 1, bytes(1 << 14) + b"x"), Code.FRAME_SIZE_ERROR),
    "a too large frame of an unknown type": (
        frame(77, 0, 1, bytes(1 << 14) + b"x"),
        Code.FRAME_SIZE_ERROR,
    ),
    "HEADERS on the connection": (headers(0), Code.PROTOCOL_ERROR),
    "HEADERS of an even stream": (headers(12), Code.PROTOCOL_ERROR),
    "HEADERS of a finished stream": (headers(5), Code.STREAM_CLOSED),
    "HEADERS with too much padding": (frame(1, 0xC, 11, b"\4abc"), Code.PROTOCOL_ERROR),
    "HEADERS without its padding's length": (frame(1, 0xC, 11), Code.FRAME_SIZE_ERROR),
    "HEADERS with half a priority": (frame(1, 0x24, 11, b"abc"), Code.FRAME_SIZE_ERROR),
    "HEADERS that cannot be decoded": (headers(11, block=b"\xff\xff\xff"), Code.COMPRESSION_ERROR),
    "HEADERS with an unknown index": (headers(11, block=b"\xfe"), Code.COMPRESSION_ERROR),
    "HEADERS cut short": (headers(11, block=b"\x00\x05abc"), Code.COMPRESSION_ERROR),
    "a table size beyond ours": (headers(11, block=b"\x3f\xe2\x1f"), Code.COMPRESSION_ERROR),
    "CONTINUATION after nothing": (frame(9, 4, 1), Code.PROTOCOL_ERROR),
    "a frame within a header block": (
        frame(1, 0, 11, BLOCK[:5]) + frame(6, 0, 0, bytes(8)),
        Code.PROTOCOL_ERROR,
    ),
    "DATA within a header block": (frame(1, 0, 11, BLOCK[:5]) + data(1, b"x"), Code.PROTOCOL_ERROR),
    "an unknown frame within a header block": (
        frame(1, 0, 11, BLOCK[:5]) + frame(99, 0, 11),
        Code.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frame(1, 0, 11, BLOCK[:5]) + frame(9, 4, 13, BLOCK[5:]),
        Code.PROTOCOL_ERROR,
    ),
    "PRIORITY on the connection": (frame(2, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
    "PRIORITY of another size": (frame(2, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
    "RST_STREAM on the connection": (frame(3, 0, 0, bytes(4)), Code.PROTOCOL_ERROR),
    "RST_STREAM of an idle stream": (frames.rst_stream_frame(11, 8), Code.PROTOCOL_ERROR),
    "RST_STREAM of another size": (frame(3, 0, 1, bytes(5)), Code.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frame(4, 0, 1), Code.PROTOCOL_ERROR),
    "SETTINGS of another size": (frame(4, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "an acknowledgement that says something": (frame(4, 1, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
    "ENABLE_PUSH of 2": (settings((2, 2)), Code.PROTOCOL_ERROR),
    "a window of 2^31": (settings((4, 1 << 31)), Code.FLOW_CONTROL_ERROR),
    "a frame size of 2^24": (settings((5, 1 << 24)), Code.PROTOCOL_ERROR),
    "a frame size of 2^14-1": (settings((5, (1 << 14) - 1)), Code.PROTOCOL_ERROR),
    "an initial window that lets a stream's overflow": (
        frames.window_update_frame(1, 0x7FFFFFFF - 65535) + settings((4, 65536)),
        Code.FLOW_CONTROL_ERROR,
    ),
    "PUSH_PROMISE": (frame(5, 4, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
    "PING of a stream": (frame(6, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "PING of another size": (frame(6, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (frame(7, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "GOAWAY of another size": (frame(7, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE by nothing": (frames.window_update_frame(0, 0), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of an idle stream": (frames.window_update_frame(11, 1), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of another size": (frame(8, 0, 0, bytes(3)), Code.FRAME_SIZE_ERROR),
    "a window that overflows": (frames.window_update_frame(0, 0x7FFFFFFF), Code.FLOW_CONTROL_ERROR),
}
RESETS_THE_STREAM = {
    "DATA after the end": (3, data(3, b"x"), Code.STREAM_CLOSED),
    "HEADERS after the end": (3, headers(3, end=True), Code.STREAM_CLOSED),
    "trailers that end nothing": (1, headers(1, block=b""), Code.PROTOCOL_ERROR),
    "trailers with a pseudo-header": (1, headers(1, end=True), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of a stream by nothing": (
        1,
        frames.window_update_frame(1, 0),
        Code.PROTOCOL_ERROR,
    ),
    "a stream's window that overflows": (
        1,
        frames.window_update_frame(1, 0x7FFFFFFF),
        Code.FLOW_CONTROL_ERROR,
    ),
}
FORGIVEN = {
    "DATA after our reset": data(7, b"x"),
    "padded DATA after our reset": frame(0, 9, 7, b"\2abcd"),
    "trailers after our reset": headers(7, end=True),
    "RST_STREAM after ours": frames.rst_stream_frame(7, 8),
    "RST_STREAM of a finished stream": frames.rst_stream_frame(5, 8),
    "WINDOW_UPDATE of a finished stream": frames.window_update_frame(5, 1),
    "WINDOW_UPDATE of a reset stream": frames.window_update_frame(9, 0x7FFFFFFF),
    "PRIORITY of an idle stream": frame(2, 0, 99, bytes(5)),
    "PRIORITY of a finished stream": frame(2, 0, 5, bytes(5)),
    "a frame of an unknown type": frame(99, 0xFF, 1, b"anything"),
    "an unknown setting": settings((0xAAAA, 0xFFFFFFFF)),
    "an acknowledgement that is not awaited": frame(4, 1, 0),
    "GOAWAY": frames.goaway_frame(0, 0, "bye"),
}


@pytest.fixture
def server():
    server = Server(max_frame_size=1 << 14, stream_window=1 << 17)
    for stream_id in (1, 3, 5, 7, 9):
        server.open(stream_id, end=stream_id in (3, 5))
    server.connection.send_headers(5, OK, end=True)
    server.connection.reset(7, Code.CANCEL)
    server.feed(frames.rst_stream_frame(9, Code.CANCEL))
    server.frames()
    return server


@pytest.mark.parametrize(("sent", "code"), ENDS_THE_CONNECTION.values(), ids=ENDS_THE_CONNECTION)
@pytest.mark.parametrize("chunk", [1 << 30, 1])
def test_the_connection_ends(server, sent, code, chunk):
    server.feed(sent, chunk)
    assert server.connection.closed
    assert server.recorder.fault == code
    kind, _, _, payload = server.frames()[-1]
    assert kind == frames.GOAWAY
    assert int.from_bytes(payload[:4], "big") == 9
    assert int.from_bytes(payload[4:8], "big") == code
    assert payload[8:]


@pytest.mark.parametrize(
    ("stream_id", "sent", "code"), RESETS_THE_STREAM.values(), ids=RESETS_THE_STREAM
)
def test_the_stream_is_reset(server, stream_id, sent, code):
    server.feed(sent)
    assert server.frames() == [(frames.RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))]
    assert server.recorder.events[-1] == ("reset", stream_id, code)
    assert not server.connection.closed
    server.open(11)
    assert server.recorder.events[-1][:2] == ("headers", 11)


@pytest.mark.parametrize("sent", FORGIVEN.values(), ids=FORGIVEN)
@pytest.mark.parametrize("chunk", [1 << 30, 1])
def test_it_is_forgiven(server, sent, chunk):
    before = len(server.recorder.events)
    server.feed(sent, chunk)
    assert {f[0] for f in server.frames()} <= {frames.SETTINGS}
    assert len(server.recorder.events) == before
    server.open(11)
    server.feed(data(1, b"goes on", end=True))
    assert server.recorder.bodies[1] == b"goes on"
    assert server.recorder.events[-1][:2] == ("headers", 11)


def test_late_frames_are_forgiven_for_a_while_only(server):
    server.now += 1000
    server.feed(data(7, b"x"))
    assert server.recorder.fault == Code.STREAM_CLOSED


def test_more_streams_than_allowed_are_refused():
    server = Server(max_concurrent_streams=2)
    for stream_id in (1, 3, 5):
        server.open(stream_id)
    server.feed(data(5, b"on its way"))
    assert server.frames() == [(frames.RST_STREAM, 0, 5, b"\0\0\0\7")]
    server.connection.reset(1, Code.CANCEL)
    server.open(7)
    assert server.recorder.events[-1][:2] == ("headers", 7)
    assert server.connection.open_streams == 2


def test_a_refused_stream_still_counts_for_the_header_table():
    server = Server(max_concurrent_streams=1)
    server.open(1)
    added = b"\x40\x01x\x01y"
    server.open(3, block=BLOCK + added)
    server.connection.reset(1, Code.CANCEL)
    server.open(5, block=BLOCK + b"\xbe")
    assert server.recorder.events[-1][:2] == ("headers", 5)


@pytest.mark.parametrize(
    ("length", "sent", "valid"),
    [
        (b"5", data(1, b"12345", end=True), True),
        (b"5", data(1, b"123") + data(1, b"45", end=True), True),
        (b"5", frame(0, 9, 1, b"\x02" + b"12345" + b"\0\0"), True),
        (b"5", data(1, b"1234", end=True), False),
        (b"5", data(1, b"123456"), False),
        (b"5", data(1, b"1") + headers(1, end=True, block=b""), False),
        (b"0", data(1, b"", end=True), True),
    ],
)
def test_the_body_has_its_content_length(length, sent, valid):
    server = Server()
    server.open(1, block=encode_headers((*REQUEST, (b"content-length", length))))
    server.feed(sent)
    assert server.recorder.ended == ({1} if valid else set())
    assert (("reset", 1, Code.PROTOCOL_ERROR) in server.recorder.events) is not valid


def test_an_answer_before_the_request_has_ended_stops_the_request():
    server = Server()
    server.open(1)
    server.connection.send_headers(1, OK, end=True)
    assert [f[0] for f in server.frames()] == [frames.HEADERS, frames.RST_STREAM]
    server.feed(data(1, b"x" * 1000, end=True))
    assert server.frames() == []
    assert server.connection.open_streams == 0
    assert not server.connection.closed
