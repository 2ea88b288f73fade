"""Messages of calls, put together by the compiled connection: whole, in pieces, wrong, or too many."""

import pytest
from hypothesis import given, settings, strategies as st

from gpubridge.frontend.grpc.connection import (
    BEGIN,
    CALL,
    DATA,
    FAILED,
    FILLED,
    LARGE,
    MESSAGES,
    RESET,
)
from tests.fuzz.grpc_endpoint import message
from tests.unit import http2_frames as frames
from tests.unit.http2_frames import encode_headers, frame
from tests.unit.test_http2_peer import REQUEST, Server, data, headers

LIMIT = 1 << 20
DIRECT = 1 << 16
METHODS = [(b"/unary", 0, 1000), (b"/infer", 0, LIMIT), (b"/stream", 1, LIMIT)]
FLAG, TOO_LONG, SECOND, INCOMPLETE, NONE = range(5)


class Events:
    """Keeps what a connection tells, views as bytes."""

    def __init__(self):
        self.events = []

    def take(self, events):
        for event in events:
            copied = tuple(bytes(v) if isinstance(v, memoryview) else v for v in event)
            self.events.append(copied)

    def of(self, stream_id):
        """Return the events of a stream, without the objects of its headers."""
        return [
            (kind, said[0], *said[2:]) if kind in (CALL, BEGIN) else (kind, *said)
            for kind, of, *said in self.events
            if of == stream_id
        ]


def block(path):
    return encode_headers(
        [field if field[0] != b":path" else (b":path", path) for field in REQUEST]
    )


def server(**limits):
    return Server(Events(), methods=METHODS, **limits)


def told(path, *sent, chunk=1 << 30):
    """Return the events of stream 1 for these frames."""
    made = server()
    made.feed(headers(1, block=block(path)) + b"".join(sent), chunk)
    return made.recorder.of(1)


@pytest.mark.parametrize(("path", "method"), [(b"/unary", 0), (b"/infer", 1)])
@pytest.mark.parametrize("body", [b"", b"hello", b"x" * 900])
def test_a_call_that_comes_at_once_is_one_event(path, method, body):
    assert told(path, data(1, message(body), end=True)) == [(CALL, method, body, False)]


@pytest.mark.parametrize(("path", "method"), [(b"/unary", 0), (b"/infer", 1)])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_one_that_comes_in_pieces_is_told_of_before(path, method, chunk):
    sent = [data(1, message(b"x" * 500)[start : start + 60]) for start in range(0, 505, 60)]
    begun, complete = told(path, *sent, data(1, b"", end=True), chunk=chunk)
    assert begun == (BEGIN, method, False)
    assert (complete[0], *complete[2:]) == (MESSAGES, [b"x" * 500], False, True)


def test_a_call_begins_with_its_message_not_with_its_end():
    made = server()
    made.feed(headers(1, block=block(b"/unary")) + data(1, message(b"m")))
    assert made.recorder.of(1) == [(CALL, 0, b"m", False)]
    made.feed(data(1, b"", end=True))
    assert made.recorder.of(1) == [(CALL, 0, b"m", False)]


def test_compressed_messages_are_marked():
    assert told(b"/infer", data(1, message(b"zip", 1), end=True)) == [(CALL, 1, b"zip", True)]
    sent = message(b"a", 1) + message(b"b", 1) + message(b"c") + message(b"d", 1)
    events = told(b"/stream", data(1, sent, end=True))
    assert [event[2:] for event in events[1:]] == [
        ([b"a", b"b"], True, False),
        ([b"c"], False, False),
        ([b"d"], True, True),
    ]
    assert sum(event[1] for event in events[1:]) == len(sent)


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("chunk", [1 << 30, 5000])
def test_a_large_message_comes_in_pieces(chunk, flag):
    body = bytes(range(256)) * 600
    events = told(b"/infer", data(1, message(body, flag), end=True), chunk=chunk)
    assert events[:2] == [(BEGIN, 1, False), (LARGE, len(body), bool(flag))]
    assert {event[0] for event in events[2:]} == {DATA}
    assert b"".join(event[1] for event in events[2:]) == body
    assert [event[2] for event in events[2:]] == [False] * (len(events) - 3) + [True]


def test_a_large_message_is_received_into_its_place():
    body = bytes(range(256)) * 1000
    made = server()
    made.feed(headers(1, block=block(b"/infer")) + data(1, message(body)[:105]))
    place = bytearray(len(body) - 100)
    made.connection.receive_into(1, memoryview(place))
    made.feed(data(1, body[100:], end=True))
    assert place == body[100:]
    assert made.recorder.of(1)[-1] == (FILLED, True)


@pytest.mark.parametrize("path", [b"/unary", b"/infer"])
@pytest.mark.parametrize(
    ("sent", "fault", "value"),
    [
        ([data(1, b"", end=True)], NONE, 0),
        ([data(1, b"\0\0", end=True)], INCOMPLETE, 0),
        ([data(1, message(b"abc", length=5), end=True)], INCOMPLETE, 0),
        ([data(1, message(b"abc", 2), end=True)], FLAG, 2),
        ([data(1, message(b"abc") + b"\0", end=True)], SECOND, 0),
        ([data(1, message(b"abc") * 2, end=True)], SECOND, 0),
        ([headers(1, end=True, block=b"")], NONE, 0),
    ],
)
def test_a_malformed_message_is_reported_once(path, sent, fault, value):
    events = told(path, *sent)
    assert [event[0] for event in events] == [BEGIN, FAILED]
    assert events[1][1:3] == (fault, value)


def test_headers_that_end_a_request_have_no_message():
    made = server()
    made.open(1, end=True, block=block(b"/unary"))
    assert [event[0] for event in made.recorder.of(1)] == [BEGIN, FAILED]


@pytest.mark.parametrize(("path", "limit"), [(b"/unary", 1000), (b"/infer", LIMIT)])
def test_a_message_beyond_the_limit_is_refused_by_its_prefix(path, limit):
    events = told(path, data(1, message(b"", length=limit + 1)))
    assert events[1:] == [(FAILED, TOO_LONG, limit + 1, limit)]
    assert told(path, data(1, message(b"", length=limit)))[-1][0] != FAILED


def test_a_second_message_ends_the_call_at_once():
    made = server()
    made.feed(headers(1, block=block(b"/infer")) + data(1, message(b"one")))
    made.feed(data(1, b"\0"))
    assert [event[0] for event in made.recorder.of(1)] == [CALL, FAILED]
    assert made.recorder.of(1)[1][1] == SECOND
    for _ in range(100):
        made.feed(data(1, message(b"two") * 10))
    assert len(made.recorder.of(1)) == 2


def test_a_second_message_behind_a_large_one_is_told_too():
    body = b"x" * (DIRECT + 1)
    events = told(b"/infer", data(1, message(body)), data(1, message(b"y")))
    assert b"".join(event[1] for event in events if event[0] == DATA) == body
    assert events[-1][:2] == (FAILED, SECOND)


def test_a_call_that_is_reset_before_it_was_told_of_was_none():
    sent = data(1, message(b"x", length=5)) + frames.rst_stream_frame(1, 8)
    assert told(b"/unary", sent) == []
    assert told(b"/stream", sent)[-1] == (RESET, 8)


def test_an_unknown_path_is_told_with_its_body_as_it_is():
    assert told(b"/other", data(1, b"any", end=True)) == [(BEGIN, -1, False), (DATA, b"any", True)]


@pytest.mark.parametrize(
    ("path", "sent", "expected"),
    [
        (b"/unary", data(1, b""), FAILED),
        (b"/infer", data(1, message(b"ab", length=3)), FAILED),
        (b"/infer", data(1, message(b"x" * 10, length=DIRECT + 1)), DATA),
        (b"/stream", data(1, message(b"ab")), MESSAGES),
        (b"/stream", data(1, message(b"ab", length=3)), FAILED),
        # A last frame that is cut short.
        *((b"/infer", data(1, message(b"ab"), end=True)[: 9 + come], FAILED) for come in (0, 3)),
    ],
)
def test_the_end_of_input_ends_every_request(path, sent, expected):
    made = server()
    made.feed(headers(1, block=block(path)) + sent)
    made.recorder.take(made.connection.end_input())
    assert made.recorder.of(1)[-1][0] == expected
    assert made.connection.end_input() == []


def test_a_stream_gets_credit_for_what_its_reader_consumes():
    made = server(stream_window=1 << 17)
    made.feed(headers(1, block=block(b"/stream")))
    made.connection.throttle(1)
    made.frames()
    made.feed(data(1, message(b"", length=LIMIT)) + data(1, bytes((1 << 17) - 5)))
    assert made.frames() == []
    counted = sum(event[1] for event in made.recorder.of(1) if event[0] == MESSAGES)
    assert counted == 1 << 17
    made.connection.consume(1, counted)
    assert (8, 0, 1) in [sent[:3] for sent in made.frames()]


@settings(derandomize=True)
@given(st.data())
def test_any_split_gives_the_same_messages(draws):
    sizes = st.sampled_from([0, 1, 4, 100, 5000, 70_000])
    messages = draws.draw(st.lists(st.tuples(sizes, st.sampled_from([0, 1])), max_size=6))
    whole = b"".join(message(bytes([n]) * size, flag) for n, (size, flag) in enumerate(messages))
    made = server()
    made.feed(headers(1, block=block(b"/stream")))
    at = 0
    while at < len(whole):
        size = draws.draw(st.sampled_from([1, 3, 16, 4000, 16_384]))
        padding = draws.draw(st.sampled_from([None, 0, 9]))
        piece = whole[at : at + size]
        at += size
        if padding is None:
            made.feed(data(1, piece))
        else:
            made.feed(frame(0, 8, 1, bytes([padding]) + piece + bytes(padding)))
    made.feed(data(1, b"", end=True))
    events = [event for event in made.recorder.of(1) if event[0] == MESSAGES]
    found = [(m, packed) for _, _, group, packed, _ in events for m in group]
    assert found == [(bytes([n]) * size, bool(flag)) for n, (size, flag) in enumerate(messages)]
    assert sum(event[1] for event in events) == len(whole)
    assert [event[4] for event in events][-1:] == [True]
