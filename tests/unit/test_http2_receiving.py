"""Payload goes where its consumer wants it, as fast as its consumer takes it."""

import pytest

from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode as Code, frame
from tests.unit.test_http2_peer import Recorder, Server, data, headers

WINDOW = 1 << 17
BODY = bytes(range(256)) * 400


def updates(server):
    """The WINDOW_UPDATEs that were sent: increments by stream."""
    return {
        stream_id: int.from_bytes(payload, "big")
        for kind, _, stream_id, payload in server.frames()
        if kind == frames.WINDOW_UPDATE
    }


@pytest.mark.parametrize("chunk", [1 << 30, 5000, 77])
@pytest.mark.parametrize("frame_size", [1 << 30, 30_000, 777])
def test_a_body_is_received_into_its_place(chunk, frame_size):
    server = Server()
    server.open(1)
    place = bytearray(len(BODY))
    server.connection.receive_into(1, memoryview(place))
    pieces = [BODY[i : i + frame_size] for i in range(0, len(BODY), frame_size)]
    for piece in pieces:
        server.feed(data(1, piece, end=piece is pieces[-1]), chunk)
    assert place == BODY
    assert server.recorder.events[1:] == [("filled", 1, True)]
    assert server.recorder.bodies == {1: b""}


def test_the_socket_receives_into_the_place_itself():
    server = Server()
    server.open(1)
    place = bytearray(len(BODY))
    server.connection.receive_into(1, memoryview(place))
    whole = data(1, BODY + b"behind", end=True)
    server.feed(whole[:100])
    memory = server.connection.memory()
    assert len(memory) == len(BODY) - 91
    memory[:1] = b"!"
    assert place[91:92] == b"!"
    del memory
    server.feed(whole[100:])
    assert server.connection.copied(1) == 91
    assert place == BODY
    assert server.recorder.events[1:] == [("filled", 1, False)]
    assert server.recorder.bodies == {1: b"behind"}
    assert server.recorder.ended == {1}


def test_the_place_ends_with_the_frame_of_its_stream():
    """Two bodies whose frames alternate, with padding, and a request between them."""
    server = Server()
    places = {1: bytearray(60_000), 3: bytearray(60_000)}
    for stream_id, place in places.items():
        server.open(stream_id)
        server.connection.receive_into(stream_id, memoryview(place))
    padded = b"\xff" + b"c" * 30_000 + bytes(255)
    server.feed(data(1, b"a" * 30_000))
    server.feed(data(3, b"b" * 20_000) + frame(0, 8, 1, padded))
    server.open(5, end=True)
    server.feed(data(3, b"d" * 40_000, end=True))
    assert places[1] == b"a" * 30_000 + b"c" * 30_000
    assert places[3] == b"b" * 20_000 + b"d" * 40_000
    assert [event[:2] for event in server.recorder.events[2:]] == [
        ("filled", 1),
        ("headers", 5),
        ("filled", 3),
    ]


@pytest.mark.parametrize(
    "last", [data(1, b"x" * 50, end=True), data(1, b"", end=True), headers(1, end=True, block=b"")]
)
def test_a_body_may_end_before_its_place_is_full(last):
    server = Server()
    server.open(1)
    server.connection.receive_into(1, memoryview(bytearray(100)))
    server.feed(last)
    assert server.recorder.ended == {1}
    assert server.recorder.bodies == {1: b""}
    assert ("filled", 1, True) not in server.recorder.events


def test_places_follow_each_other():
    class Lengths(Recorder):
        """Five bytes of length, then as much; repeatedly."""

        got = ()

        def on_headers(self, stream_id, headers, end):
            super().on_headers(stream_id, headers, end)
            self.want(5)

        def want(self, size):
            self.place = bytearray(size)
            self.left = memoryview(self.place)
            server.connection.receive_into(1, self.left)

        def on_data(self, stream_id, view, end):
            # It came together with what filled the last place.
            while view:
                size = min(len(self.left), len(view))
                self.left[:size] = view[:size]
                self.left, view = self.left[size:], view[size:]
                if self.left:
                    server.connection.receive_into(1, self.left)
                else:
                    self.on_filled(stream_id, end)

        def on_filled(self, stream_id, end):
            if len(self.place) == 5:
                self.want(int(self.place))
            else:
                self.got += (bytes(self.place),)
                self.want(5)

    server = Server(Lengths())
    server.open(1)
    for chunk in (1, 9, 1 << 30):
        server.feed(data(1, b"00003abc00010") + data(1, b"0123456789"), chunk)
    assert server.recorder.got == (b"abc", b"0123456789") * 3


def test_a_place_is_let_go_when_its_stream_is():
    server = Server()
    server.open(1)
    place = bytearray(50_000)
    server.connection.receive_into(1, memoryview(place))
    server.feed(data(1, bytes(40_000))[:20_000])
    server.connection.reset(1, Code.CANCEL)
    place.clear()  # refused while a view of it is held
    server.feed(data(1, bytes(40_000))[20_000:])
    server.open(3)
    assert server.recorder.events[-1][:2] == ("headers", 3)


def test_credit_comes_by_halves():
    server = Server(stream_window=WINDOW)
    server.open(1)
    server.feed(data(1, bytes(WINDOW // 2 - 1)))
    assert updates(server) == {}
    server.feed(data(1, b"x"))
    assert updates(server) == {1: WINDOW // 2}
    server.feed(data(1, bytes(WINDOW), end=True))
    assert updates(server) == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_stream_on_hold_gets_credit_for_what_is_consumed(whole):
    server = Server(stream_window=WINDOW)
    server.open(1)
    server.connection.throttle(1)
    for _ in range(8):
        server.feed(data(1, bytes(WINDOW // 8)), 1 << 30 if whole else 1000)
    assert updates(server) == {}
    server.connection.consume(1, WINDOW // 4)
    assert updates(server) == {}
    server.connection.consume(1, WINDOW // 4)
    assert updates(server) == {1: WINDOW // 2}
    server.feed(data(1, bytes(WINDOW // 2 + 1)))
    assert server.recorder.events[-1] == ("reset", 1, Code.FLOW_CONTROL_ERROR)


def test_a_stream_on_hold_does_not_stop_the_others():
    server = Server(stream_window=WINDOW, connection_window=2 * WINDOW)
    server.open(1)
    server.connection.throttle(1)
    server.open(3)
    for _ in range(20):
        server.feed(data(3, bytes(WINDOW // 2)))
    server.feed(data(1, bytes(WINDOW)))
    assert len(server.recorder.bodies[3]) == 10 * WINDOW
    assert not server.connection.closed


def test_a_place_gives_the_credit_to_fill_it():
    server = Server(stream_window=WINDOW)
    server.open(1)
    server.feed(data(1, b"12345"))
    server.connection.receive_into(1, memoryview(bytearray(10 * WINDOW)))
    assert updates(server) == {1: 9 * WINDOW + 5}
    server.feed(data(1, bytes(4 * WINDOW)) + data(1, bytes(6 * WINDOW)))
    assert server.recorder.events[-1] == ("filled", 1, False)


@pytest.mark.parametrize("padding", [0, 255])
def test_more_than_the_window_is_refused(padding):
    server = Server(stream_window=WINDOW)
    server.open(1)
    server.feed(frame(0, 8, 1, bytes([padding]) + bytes(WINDOW - 1) + b"x"))
    assert server.recorder.events[-1] == ("reset", 1, Code.FLOW_CONTROL_ERROR)
    server.open(3)
    assert server.recorder.events[-1][:2] == ("headers", 3)


def test_a_place_in_the_middle_of_a_frame_needs_no_credit_for_what_is_under_way():
    server = Server(stream_window=WINDOW)
    server.open(1)
    whole = data(1, bytes(WINDOW - 10))
    server.connection.throttle(1)
    server.feed(whole[:1000])
    server.connection.receive_into(1, memoryview(bytearray(WINDOW)))
    assert updates(server) == {1: 1000 - 9}


def test_the_connections_window_is_widened_by_halves():
    server = Server(connection_window=WINDOW)
    for number in range(WINDOW // 2048):
        server.feed(headers(2 * number + 1) + data(2 * number + 1, bytes(1024), end=True))
    assert updates(server) == {0: WINDOW // 2}


def test_more_than_the_connections_window_ends_it():
    server = Server(stream_window=1 << 20, connection_window=WINDOW)
    server.open(1)
    server.feed(data(1, bytes(WINDOW + 1)))
    assert server.recorder.fault == Code.FLOW_CONTROL_ERROR


def test_no_window_is_widened_for_an_only_message_whose_rest_fits():
    infer = (b"/service/method", 0, 1 << 30)
    server = Server(methods=[infer], stream_window=WINDOW)
    server.open(1)
    place = bytearray(100_000)
    server.feed(data(1, b"\0" + (len(place) + 1).to_bytes(4, "big") + b"!"))
    server.connection.receive_into(1, memoryview(place))
    for _ in range(10):
        server.feed(data(1, bytes(10_000)))
    assert server.recorder.events[-1] == ("filled", 1, False)
    assert updates(server) == {}
