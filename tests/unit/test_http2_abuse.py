"""Peers who make us work for nothing are sent away, and others are not."""

import pytest

from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode as Code, encode_headers, frame
from tests.unit.test_http2_peer import BLOCK, OK, Server, data, headers, settings

IDLE = {
    "PING": frame(6, 0, 0, bytes(8)),
    "PING answers": frame(6, 1, 0, bytes(8)),
    "SETTINGS": settings((4, 1)) + settings((4, 2)),
    "SETTINGS acknowledgements": frame(4, 1, 0),
    "PRIORITY": frame(2, 0, 1, bytes(5)),
    "WINDOW_UPDATE": frames.window_update_frame(1, 1),
    "WINDOW_UPDATE of the connection": frames.window_update_frame(0, 1),
    "empty DATA": data(1, b""),
    "DATA of nothing but padding": frame(0, 8, 1, b"\5" + bytes(5)),
    "unknown frames": frame(99, 0, 1, b"x"),
    "GOAWAY": frames.goaway_frame(0, 0, ""),
}


@pytest.mark.parametrize("flood", IDLE.values(), ids=IDLE)
def test_a_flood_of_idle_frames_ends_the_connection(flood):
    server = Server(idle_frames=100, idle_frames_per_second=10)
    server.open(1)
    server.feed(flood * 99 if flood != IDLE["SETTINGS"] else flood * 49)
    assert not server.connection.closed
    server.now += 5
    server.feed(flood * (50 if flood != IDLE["SETTINGS"] else 25))
    assert not server.connection.closed
    server.feed(flood * 10)
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM
    assert server.frames()[-1][0] == frames.GOAWAY


def test_answers_that_nobody_reads_are_bounded():
    server = Server(unsent_control_frames=50)
    for _ in range(10):
        server.feed(IDLE["PING"] * 50)
        assert len(server.frames()) == 50
    server.feed(IDLE["PING"] * 51)
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM
    assert len(server.frames()) == 52


def test_work_pays_for_idle_frames():
    server = Server(idle_frames=10, idle_frames_per_second=0)
    for number in range(200):
        server.open(2 * number + 1, end=True)
        server.connection.send_headers(2 * number + 1, OK, end=True)
        server.feed(IDLE["PING"] + frames.window_update_frame(0, 10))
    assert not server.connection.closed


def test_streams_that_are_open_together_have_windows_told_of_together():
    server = Server(idle_frames=50, idle_frames_per_second=0)
    streams = range(1, 201, 2)
    for stream_id in streams:
        server.open(stream_id, end=True)
    for stream_id in streams:
        server.feed(frames.window_update_frame(stream_id, 1))
    assert not server.connection.closed


def test_rapid_reset_ends_the_connection():
    server = Server(resets=50, resets_per_second=1)
    for number in range(60):
        server.feed(
            headers(2 * number + 1, end=True) + frames.rst_stream_frame(2 * number + 1, Code.CANCEL)
        )
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM
    told = [event[0] for event in server.recorder.events]
    assert told.count("headers") == 51
    assert told.count("reset") == 50


@pytest.mark.parametrize(
    "provocation", [frames.window_update_frame(1, 0), headers(1, end=True, block=b"")]
)
def test_making_us_reset_counts_the_same(provocation):
    server = Server(resets=50, resets_per_second=1)
    for number in range(60):
        stream_id = (2 * number + 1).to_bytes(4, "big")
        server.open(2 * number + 1, end=True)
        server.feed(provocation[:5] + stream_id + provocation[9:])
        server.output()
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM


def test_refused_streams_count_too():
    server = Server(resets=50, resets_per_second=1, max_concurrent_streams=1)
    for number in range(60):
        server.open(2 * number + 1)
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM


def test_clients_that_cancel_some_of_their_calls_are_served():
    server = Server(resets=20, resets_per_second=0)
    for number in range(500):
        stream_id = 2 * number + 1
        server.open(stream_id, end=True)
        if number % 2:
            server.feed(frames.rst_stream_frame(stream_id, Code.CANCEL))
        else:
            server.connection.send_headers(stream_id, OK, end=True)
    assert not server.connection.closed


@pytest.mark.parametrize("payload", [b"", b"x", b"x" * 5000])
def test_a_continuation_flood_ends_the_connection(payload):
    server = Server()
    server.feed(frame(1, 0, 1, BLOCK))
    for _ in range(17):
        assert not server.connection.closed or payload
        server.feed(frame(9, 0, 1, payload))
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM
    assert server.recorder.events[0][0] == "closed"


def test_continuation_within_bounds_is_a_header_block():
    server = Server()
    block = BLOCK + encode_headers([(b"x", b"y" * 9000)])
    server.feed(frame(1, 1, 1, block[:7]), 1)
    for start in range(7, len(block), 1000):
        last = start + 1000 >= len(block)
        server.feed(frame(9, 4 * last, 1, block[start : start + 1000]), 700)
    assert server.recorder.events == [("headers", 1, b"/service/method")]
    assert server.recorder.ended == {1}


@pytest.mark.parametrize("kind", [frames.HEADERS, frames.SETTINGS, frames.GOAWAY])
def test_a_large_control_frame_is_refused_by_its_header(kind):
    server = Server()
    stream_id = int(kind == frames.HEADERS)
    server.feed(frames.pack_header((1 << 20) << 8 | kind, 0, stream_id))
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM


def test_a_header_bomb_ends_the_connection():
    server = Server()
    large = b"\x40" + encode_headers([(b"x", b"y" * 3000)])[1:]
    server.open(1, block=BLOCK + large)
    assert not server.connection.closed
    server.open(3, block=BLOCK + b"\xbe" * 10_000)
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "block",
    [
        b"\xff" + b"\xff" * 1000 + b"\x01",
        b"\x00\x7f" + b"\xff" * 1000,
        b"\x3f" + b"\xff" * 20 + b"\x01",
        BLOCK + b"\x20",
    ],
)
def test_broken_compression_ends_the_connection(block):
    server = Server()
    server.open(1, block=block)
    assert server.recorder.fault == Code.COMPRESSION_ERROR


def test_a_window_of_one_byte_is_served():
    server = Server()
    server.feed(settings((4, 1)))
    server.open(1, end=True)
    server.frames()
    body = bytes(range(200))
    server.connection.send_data(1, [memoryview(body)], end=True)
    got = b""
    for number in range(200):
        ((kind, flags, _, payload),) = server.frames()
        assert kind == frames.DATA
        assert len(payload) == 1
        assert flags == (number == 199)
        got += payload
        server.feed(frames.window_update_frame(1, 1))
    assert got == body
    assert server.frames() == []


def test_the_debug_text_says_what_was_expected():
    server = Server()
    server.feed(frame(6, 0, 0, bytes(7)))
    assert server.frames()[-1][3][8:] == b"PING: expected 8 bytes, got 7"


def test_a_budget_comes_back_with_time_and_with_work():
    server = Server(idle_frames=4, idle_frames_per_second=2)
    ping = IDLE["PING"]

    def survives(count):
        for _ in range(count):
            server.feed(ping)
            server.output()
        return not server.connection.closed

    assert survives(3)  # and the SETTINGS at the beginning
    server.now = 0.5
    assert survives(1)
    # Each stream completed, and each DATA frame sent, allows four more.
    server.open(1, end=True)
    server.connection.send_headers(1, OK, end=True)
    assert survives(4)
    server.now = 1000.0
    # But never more than at the beginning.
    assert survives(4)
    assert not survives(1)
