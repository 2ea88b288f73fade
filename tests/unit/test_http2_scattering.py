"""A body in small frames comes with few reads, and lies where it belongs whatever stands between."""

import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings as test_settings, strategies as st

from tests.unit import http2_frames as frames
from tests.unit.http2_frames import encode_headers, frame
from tests.unit.test_http2_peer import BLOCK, REQUEST, Server, data, headers

FRAME = 1 << 14
BODY = bytes(range(251)) * 2400


def framed(stream_id, body, size=FRAME, *, end=True):
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return [data(stream_id, piece, end=end and piece is pieces[-1]) for piece in pieces]


class Reader(Server):
    """Receives from a socket, as the server does; counts the reads that its transport makes."""

    def __init__(self, **limits):
        self.reads = self.packets = 0
        super().__init__(**limits)

    def feed(self, data, chunk=1 << 30):
        if chunk < 1 << 30:
            for start in range(0, len(data), chunk):
                self._receive(data[start : start + chunk])
        else:
            self._receive(data)

    def _receive(self, data):
        """Receive what comes in one packet, or as much of it as a socket holds at a time."""
        theirs, ours = socket.socketpair()
        with theirs, ours:
            for each in (theirs, ours):
                each.setblocking(False)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            left = memoryview(data)
            while True:
                if left:
                    with suppress(BlockingIOError):
                        left = left[theirs.send(left) :]
                        self.packets += 1
                try:
                    nbytes = ours.recv_into(self.connection.memory())
                except BlockingIOError:
                    break
                self.reads += 1
                self.recorder.take(self.connection.received(nbytes, self.now))
                if nbytes >= 4096:
                    self._read_more(ours)

    def _read_more(self, ours):
        while events := self.connection.receive_more(ours.fileno(), self.now):
            self.recorder.take(events)


def receive(sent, places, chunk=1 << 30, block=BLOCK):
    server = Reader()
    for stream_id, place in places.items():
        server.open(stream_id, block=block)
        server.connection.receive_into(stream_id, memoryview(place))
    server.feed(sent, chunk)
    return server


def test_most_frames_come_with_few_reads_and_without_a_copy():
    place = bytearray(len(BODY))
    server = receive(b"".join(framed(1, BODY)), {1: place})
    assert place == BODY
    assert server.recorder.events[1:] == [("filled", 1, True)]
    assert server.reads < 8
    # What a read brings that begins behind a frame: once each time that the socket had no more.
    assert server.packets < 6
    assert server.connection.copied(1) <= 24_576 * server.packets


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_content_length_is_kept_to(more):
    block = encode_headers([*REQUEST, (b"content-length", b"%d" % (len(BODY) + more))])
    place = bytearray(len(BODY))
    server = receive(b"".join(framed(1, BODY)), {1: place}, block=block)
    if more:
        assert (3, b"\0\0\0\1") in [(kind, payload) for kind, _, _, payload in server.frames()]
    else:
        assert server.recorder.events[1:] == [("filled", 1, True)]
        assert server.reads < 8
        assert place == BODY


def test_bodies_whose_frames_alternate():
    places = {1: bytearray(len(BODY)), 3: bytearray(len(BODY))}
    other = BODY[::-1]
    sent = [piece for pair in zip(framed(1, BODY), framed(3, other), strict=True) for piece in pair]
    server = receive(b"".join(sent), places)
    assert places[1] == BODY
    assert places[3] == other
    assert server.recorder.ended == {1, 3}


def test_a_stream_that_is_reset_between_leaves_its_place_alone():
    place = bytearray(len(BODY))
    sent = framed(1, BODY)
    sent[22:] = [frames.rst_stream_frame(1, 8), headers(3, end=True)]
    server = receive(b"".join(sent), {1: place})
    assert ("reset", 1, 8) in server.recorder.events
    assert server.recorder.events[-1][:2] == ("headers", 3)
    place.clear()  # refused while a view of it is held


def test_more_than_the_frame_limit_ends_the_connection():
    server = Reader(max_frame_size=FRAME)
    server.open(1)
    server.connection.receive_into(1, memoryview(bytearray(len(BODY))))
    server.feed(b"".join(framed(1, BODY[: 20 * FRAME], end=False)) + data(1, bytes(FRAME + 1)))
    assert server.recorder.fault == 6


def test_the_windows_are_given_back():
    server = Reader(stream_window=1 << 17, connection_window=1 << 18)
    server.open(1)
    server.connection.receive_into(1, memoryview(bytearray(1 << 20)))
    server.frames()
    server.feed(b"".join(framed(1, bytes(1 << 20), end=False)))
    given_back = sum(
        int.from_bytes(payload, "big")
        for kind, _, stream_id, payload in server.frames()
        if kind == frames.WINDOW_UPDATE and not stream_id
    )
    assert not server.connection.closed
    # By halves, when they are used up.
    assert 0 <= (1 << 20) - given_back <= 1 << 17


@given(
    sizes=st.lists(
        st.integers(3000, 40_000) | st.sampled_from([4096, FRAME, 65_536]), min_size=1, max_size=12
    ),
    between=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("phrsu")), max_size=4),
    chunk=st.integers(4096, 200_000) | st.sampled_from([16_384, 16_393, 1 << 30]),
)
@test_settings(derandomize=True)
def test_it_is_the_same_as_frame_by_frame(sizes, between, chunk):
    body = (BODY * 2)[: sum(sizes) * 3]
    sent, start = [], 0
    for size in sizes:
        for _ in range(3):
            sent.append(data(1, body[start : start + size], end=start + size == len(body)))
            start += size
    for turn, (at, what) in reversed(list(enumerate(sorted(between), 1))):
        extra = {
            "p": frame(frames.PING, 0, 0, b"12345678"),
            "h": frame(99, 0, 0, b"unknown"),
            "r": frames.window_update_frame(0, 1),
            "s": headers(2 * turn + 1, end=True),
            "u": frame(0x55, 0, 1, bytes(60_000)),
        }[what]
        sent.insert(at, extra)
    seen = []
    for kind in (Server, Reader):
        server = kind()
        server.open(1)
        place = bytearray(len(body))
        server.connection.receive_into(1, memoryview(place))
        server.feed(b"".join(sent), chunk)
        seen.append((bytes(place), server.recorder.events, sorted(server.frames())))
    assert seen[0] == seen[1]
    assert seen[0][0] == body


@pytest.mark.parametrize("chunk", [24_576, 1 << 30])
def test_frames_behind_the_end_of_their_stream_are_refused_wherever_they_came(chunk):
    place = bytearray(len(BODY))
    sent = [*framed(1, BODY[: 2 * FRAME]), *framed(1, BODY[2 * FRAME :])]
    server = receive(b"".join(sent), {1: place}, chunk)
    assert server.recorder.ended == {1}
    assert server.recorder.fault is not None or (3, 1) in [
        (kind, stream_id) for kind, _, stream_id, _ in server.frames()
    ]
    place.clear()  # refused while a view of it is held


def test_no_credit_is_sent_for_a_body_that_the_window_lets_through():
    place = bytearray(len(BODY))
    server = receive(b"".join(framed(1, BODY)), {1: place})
    assert len(BODY) > (1 << 20) // 2  # half of the window is used up
    assert (frames.WINDOW_UPDATE, 1) not in [
        (kind, stream_id) for kind, _, stream_id, _ in server.frames()
    ]


@pytest.mark.parametrize("size", [FRAME, 1 << 17])
def test_a_stream_that_goes_on_behind_a_full_target_gets_its_credit(size):
    server = Reader()
    server.open(1)
    for _ in range(5):  # more than any window lets through by itself
        place = bytearray(len(BODY))
        server.connection.receive_into(1, memoryview(place))
        server.feed(b"".join(framed(1, BODY, size, end=False)))
        assert place == BODY
    assert server.recorder.fault is None
    assert server.recorder.events[1:] == [("filled", 1, False)] * 5


@pytest.mark.parametrize("size", [FRAME, 1 << 17])
def test_data_after_a_full_window_gets_its_credit(size):
    server = Reader()
    server.open(1)
    server.frames()
    place = bytearray((1 << 20) - 5)
    server.connection.receive_into(1, memoryview(place))
    server.feed(b"".join(framed(1, bytes(len(place)), size, end=False)))
    assert server.recorder.events[1:] == [("filled", 1, False)]
    assert (frames.WINDOW_UPDATE, 1) in [(kind, of) for kind, _, of, _ in server.frames()]


@pytest.mark.parametrize("beyond", [1, FRAME, 3 * FRAME])
@pytest.mark.parametrize("frames_before", [2, 9, 21])
def test_a_content_length_ends_what_is_predicted(beyond, frames_before):
    """A place, as gRPC's length makes it, may be larger than the content-length lets come."""
    within = frames_before * FRAME + FRAME - beyond % FRAME
    block = encode_headers([*REQUEST, (b"content-length", b"%d" % within)])
    sent = framed(1, BODY[: within + beyond], end=False)
    seen = []
    for kind in (Server, Reader):
        server = kind()
        server.open(1, block=block)
        place = bytearray(len(BODY))
        server.connection.receive_into(1, memoryview(place))
        server.feed(b"".join(sent))
        seen.append(((frames.RST_STREAM, b"\0\0\0\1") in told(server), server.recorder.fault))
    assert seen == [(True, None)] * 2


def told(server):
    return [(kind, payload) for kind, _, _, payload in server.frames()]


@pytest.mark.parametrize("window", ["stream", "connection"])
@pytest.mark.parametrize("frames_within", [3, 4, 8, 13])
def test_a_window_ends_what_is_predicted(window, frames_within):
    limits = {"stream_window": 1 << 16, "connection_window": 1 << 17}
    if window == "stream":
        limits["connection_window"] = 1 << 24
    else:
        limits["stream_window"] = 1 << 24
    seen = []
    for kind in (Server, Reader):
        server = kind(**limits)
        server.open(1)
        place = bytearray(len(BODY))
        # What came before its place was given leaves less of a window than the place is large.
        server.feed(data(1, bytes(FRAME)))
        server.connection.receive_into(1, memoryview(place))
        server.feed(b"".join(framed(1, BODY, 1 << 14, end=False)[:frames_within]))
        seen.append((server.recorder.events, server.recorder.fault, server.connection.closed))
    assert seen[0] == seen[1]
