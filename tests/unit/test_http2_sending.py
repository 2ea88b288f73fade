"""Sending over HTTP/2: in order, in turn, within the peer's windows, without copies."""

import gc
import random
import socket
import weakref

import numpy as np
import pytest

from gpubridge.dataplane import HeaderFields
from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode as Code, window_update_frame as update
from tests.unit.test_http2_peer import (
    DONE,
    DONE_BLOCK,
    OK,
    OK_BLOCK,
    Recorder,
    Server,
    settings,
    split,
)

WIDE = frames.window_update_frame(0, 0x7FFFFFFF - 65535) + settings((4, 0x7FFFFFFF))


@pytest.fixture
def server():
    server = Server()
    server.feed(WIDE)
    for stream_id in (1, 3, 5):
        server.open(stream_id, end=True)
    server.frames()
    return server


def bodies(sent):
    """Join what was sent of each stream."""
    found = {}
    for kind, _, stream_id, payload in sent:
        if kind == frames.DATA:
            found.setdefault(stream_id, []).append(payload)
    return {stream_id: b"".join(payloads) for stream_id, payloads in found.items()}


def test_small_responses_become_one_write(server):
    connection = server.connection
    for stream_id in (1, 3):
        connection.send_headers(stream_id, OK)
        connection.send_data(stream_id, [b"ab", memoryview(b"cd")])
        connection.send_headers(stream_id, DONE, end=True)
    (written,), _, _ = connection.flush(-1)
    assert connection.flush(-1) is None
    assert split(bytes(written)) == [
        frame
        for stream_id in (1, 3)
        for frame in (
            (frames.HEADERS, 4, stream_id, OK_BLOCK),
            (frames.DATA, 0, stream_id, b"abcd"),
            (frames.HEADERS, 5, stream_id, DONE_BLOCK),
        )
    ]
    assert connection.open_streams == 1


def test_fields_are_encoded_and_large_blocks_split(server):
    value = b"v" * 40_000
    fields = HeaderFields([(b":status", b"200"), (b"x", value)])
    server.connection.send_headers(1, fields, end=True)
    sent = server.frames()
    assert [frame[:3] for frame in sent] == [
        (frames.HEADERS, 1, 1),
        (frames.CONTINUATION, 0, 1),
        (frames.CONTINUATION, 4, 1),
    ]
    assert b"".join(frame[3] for frame in sent).endswith(value)


def test_large_memory_is_handed_on_as_it_is(server):
    server.feed(settings((5, (1 << 24) - 1)))
    server.frames()
    memory = np.zeros(3 << 20, np.uint8)
    server.connection.send_data(1, [memoryview(memory)])
    parts = []
    while (outcome := server.connection.flush(-1)) and outcome[0]:
        parts += outcome[0]
    large = [part for part in parts if len(part) > 100]
    assert all(np.shares_memory(np.frombuffer(part, np.uint8), memory) for part in large)
    assert sum(map(len, large)) == memory.size
    assert len(large) == 3  # a mebibyte at a time


@pytest.mark.parametrize("way", ["sent", "reset", "reset by the peer", "closed"])
def test_memory_is_let_go(server, way):
    memory = np.zeros(300_000, np.uint8)
    gone = weakref.ref(memory)
    server.connection.send_data(1, [memoryview(memory)])
    del memory
    assert gone() is not None
    if way == "sent":
        server.output()
    elif way == "reset":
        server.connection.reset(1, Code.CANCEL)
    elif way == "reset by the peer":
        server.feed(frames.rst_stream_frame(1, Code.CANCEL))
    else:
        server.connection.close(Code.NO_ERROR, "")
    gc.collect()
    assert gone() is None
    assert server.connection.queued(1) == 0


def test_windows_hold_data_back_and_trailers_behind_it():
    server = Server()
    server.feed(settings((4, 10)))
    server.open(1, end=True)
    server.frames()
    server.connection.send_headers(1, OK)
    server.connection.send_data(1, [b"0123456", b"789abcdef"])
    server.connection.send_headers(1, DONE, end=True)
    assert bodies(server.frames()) == {1: b"0123456789"}
    assert server.connection.queued(1) == 6
    server.feed(frames.window_update_frame(1, 3))
    assert bodies(server.frames()) == {1: b"abc"}
    server.feed(settings((4, 5)))
    assert bodies(server.frames()) == {}
    server.feed(settings((4, 20)))
    sent = [frame for frame in server.frames() if frame[0] != frames.SETTINGS]
    assert sent == [(frames.DATA, 0, 1, b"def"), (frames.HEADERS, 5, 1, DONE_BLOCK)]
    assert server.connection.open_streams == 0


def test_the_connections_window_holds_back_all():
    server = Server()
    for stream_id in (1, 3):
        server.open(stream_id, end=True)
        server.connection.send_data(stream_id, [bytes(40_000)], end=True)
    assert sum(map(len, bodies(server.frames()).values())) == 65535
    server.open(5, end=True)
    server.connection.send_headers(5, DONE, end=True)
    assert [frame[2] for frame in server.frames()] == [5]
    server.feed(frames.window_update_frame(0, 100_000))
    assert sum(map(len, bodies(server.frames()).values())) == 80_000 - 65535
    assert server.connection.open_streams == 0


def test_streams_take_turns(server):
    server.connection.send_data(1, [bytes(8 << 20)], end=True)
    server.connection.send_data(3, [bytes(300_000)], end=True)
    server.connection.send_data(5, [b"small"], end=True)
    first = b"".join(bytes(part) for part in server.connection.flush(-1)[0])
    seen = bodies(split(first))
    assert seen[5] == b"small"
    assert len(seen[1]) < 2 << 20
    assert len(bodies(split(first) + server.frames())[3]) == 300_000
    assert max(len(frame[3]) for frame in split(first)) == 16384


def test_a_turn_is_no_longer_than_its_share(server):
    server.feed(settings((5, (1 << 24) - 1)))
    server.frames()
    for stream_id in (1, 3):
        server.connection.send_data(stream_id, [bytes(300_000)])
    server.connection.send_data(5, [b"small"])
    sent = [(frame[2], len(frame[3])) for frame in server.frames()]
    share = 1 << 17
    assert sent[:3] == [(1, share), (3, share), (5, 5)]
    assert sum(size for _, size in sent) == 600_005


def test_the_handler_is_told_when_nothing_is_queued_any_more():
    class Pages(Recorder):
        """Sends the next page when the last is gone."""

        left = 5

        def on_writable(self, stream_id):
            super().on_writable(stream_id)
            self.left -= 1
            page = bytes([self.left]) * 100_000
            server.connection.send_data(stream_id, [page], end=not self.left)

    server = Server(Pages())
    server.feed(WIDE)
    server.open(1, end=True)
    server.connection.send_data(1, [b"\5" * 100_000])
    assert server.connection.queued(1) == 100_000
    assert bodies(server.frames()) == {1: b"".join(bytes([n]) * 100_000 for n in range(5, -1, -1))}
    assert server.recorder.events[1:] == [("writable", 1)] * 5


def test_ended_streams_take_nothing_more(server):
    connection = server.connection
    connection.send_data(1, [bytes(50_000)])
    with pytest.raises(RuntimeError, match="expected trailers"):
        connection.send_headers(1, OK)
    connection.send_headers(1, DONE, end=True)
    with pytest.raises(RuntimeError, match="expected"):
        connection.send_data(1, [b"more"])
    with pytest.raises(RuntimeError, match="expected"):
        connection.send_headers(1, DONE, end=True)
    server.output()
    for stream_id in (1, 99):
        connection.send_headers(stream_id, OK)
        connection.send_data(stream_id, [b"nobody"], end=True)
        connection.reset(stream_id, Code.CANCEL)
        connection.receive_into(stream_id, memoryview(bytearray(5)))
        connection.throttle(stream_id)
        connection.consume(stream_id, 5)
    assert server.output() == b""


def test_a_peer_with_a_small_header_table_is_told_that_ours_is_as_small():
    server = Server()
    server.feed(settings((1, 100), (1, 4096)))
    for stream_id in (1, 3):
        server.open(stream_id)
        server.connection.send_headers(stream_id, OK)
    blocks = [frame[3] for frame in server.frames() if frame[0] == frames.HEADERS]
    assert blocks == [b"\x3f\x45\x3f\xe1\x1f" + OK_BLOCK, OK_BLOCK]


def test_an_empty_end_needs_no_window():
    server = Server()
    server.feed(settings((4, 0)))
    server.open(1, end=True)
    server.frames()
    server.connection.send_data(1, [b""])
    assert server.frames() == []
    server.connection.send_data(1, [], end=True)
    assert server.frames() == [(frames.DATA, 1, 1, b"")]


@pytest.mark.parametrize(
    "before",
    [
        b"",
        settings((4, 3)),
        settings((1, 0)),
        settings((4, 0)) + update(0, 1 << 20),
        settings((4, 1 << 20)),
    ],
    ids=["free", "a narrow stream", "a smaller table", "a closed stream", "a wide stream"],
)
@pytest.mark.parametrize(
    "bodies",
    [
        [[], [b"12345"], [b"12", b"345"], [b""], [b"1"]],
        [[bytes(60_000)], [b"12345"], [b"1"], [], [b"1"]],
        [[bytes(16_000)]] * 5,
    ],
    ids=["small", "one large", "more than the connection may"],
)
def test_a_response_at_once_is_one_in_three_pieces(before, bodies):
    outputs = []
    for at_once in (True, False):
        server = Server()
        server.feed(before)
        connection = server.connection
        for stream_id, body in zip((1, 3, 5, 7, 9), bodies, strict=True):
            server.open(stream_id, end=True)
            if at_once:
                connection.send_response(stream_id, OK, body, DONE)
            else:
                connection.send_headers(stream_id, OK)
                connection.send_data(stream_id, body)
                connection.send_headers(stream_id, DONE, end=True)
        sent = [server.output()]
        server.feed(update(0, 1 << 20) + update(1, 1 << 20) + update(9, 1 << 20))
        sent += [server.output(), connection.open_streams]
        # What is left of the connection's window.
        server.open(11, end=True)
        connection.send_data(11, [bytes(2 << 20)], end=True)
        sent.append(len(server.output()))
        outputs.append(sent)
    assert outputs[0] == outputs[1]


def test_a_response_to_nobody_is_none():
    server = Server()
    server.connection.send_response(1, OK, [b"x"], DONE)
    assert server.output() == b""


@pytest.fixture
def sockets():
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    yield pair
    for each in pair:
        each.close()


def drain(source):
    came = b""
    while True:
        try:
            came += source.recv(1 << 22)
        except BlockingIOError:
            return came


@pytest.mark.parametrize("frame_size", [16_384, 1 << 20])
def test_unsent_bytes_are_returned_in_order(server, sockets, frame_size):
    ours, theirs = sockets
    server.feed(settings((5, frame_size)))
    server.output()
    body = random.Random(frame_size).randbytes(5_000_001)
    server.connection.send_headers(1, OK)
    server.connection.send_data(1, [body[:7], memoryview(body)[7:3_000_000], body[3_000_000:]])
    server.connection.send_headers(1, DONE, end=True)
    sent, returned = b"", 0
    while outcome := server.connection.flush(ours.fileno()):
        sent += drain(theirs)
        sent += b"".join(outcome[0])
        returned += len(outcome[0])
    found = split(sent + drain(theirs))
    assert bodies(found) == {1: body}
    assert [(kind, payload) for kind, _, _, payload in (found[0], found[-1])] == [
        (frames.HEADERS, OK_BLOCK),
        (frames.HEADERS, DONE_BLOCK),
    ]
    assert returned  # a socket's buffer is smaller than that


def test_others_have_their_turn_while_a_client_reads_as_fast_as_is_sent(server, sockets):
    ours, theirs = sockets
    server.connection.send_data(1, [bytes(30 << 20)], end=True)
    left, _, more = server.connection.flush(ours.fileno())
    assert left or more
    assert sum(map(len, left)) + len(drain(theirs)) < 10 << 20


def test_a_socket_that_has_failed_takes_and_brings_nothing(server, sockets):
    ours, theirs = sockets
    theirs.close()
    server.connection.send_data(1, [b"answer"], end=True)
    ((left,), _, _) = server.connection.flush(ours.fileno())
    assert bytes(left).endswith(b"answer")
    assert server.connection.receive_more(ours.fileno(), 0.0) == []


def test_an_answer_is_one_write(server):
    """Its headers do not go ahead: each packet wakes its client."""
    ours, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, client:
        server.connection.send_response(1, OK, [b"begin", bytes(40_000)], DONE)
        assert server.connection.flush(ours.fileno()) is None
        kinds = [frame[0] for frame in split(client.recv(1 << 20))]
    assert kinds == [frames.HEADERS, *[frames.DATA] * 3, frames.HEADERS]
