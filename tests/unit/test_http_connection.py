"""HttpConnection fed by hand: framing, order, limits, and what becomes of handlers."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.http_door import GET, Door, chunked, error, parse_answers, post


def some_bytes(size):
    # Line ends and heads within bodies must not be taken for framing.
    unit = b"\r\n\r\nGET / HTTP/1.1\r\n" + random.Random(size).randbytes(100)
    return (unit * (size // len(unit) + 1))[:size]


UPGRADE = b"Connection: Upgrade", b"Upgrade: h2c"
EXCHANGES = {
    "get": lambda body, size: (GET, (200, b"")),
    "post": lambda body, size: (post(body), (200, body)),
    "expect": lambda body, size: (post(body, b"/echo", b"Expect: 100-continue"), (200, body)),
    "upgrade": lambda body, size: (post(body, b"/echo", *UPGRADE), (200, body)),
    "chunked": lambda body, size: (chunked(body, size), (200, body)),
    "trailer": lambda body, size: (
        chunked(body, size, trailer=b"Content-Encoding: gzip\r\n"),
        (200, body),
    ),
    "gzip": lambda body, size: (
        post(gzip.compress(body), b"/echo", b"Content-Encoding: gzip"),
        (200, body),
    ),
    "deflate": lambda body, size: (
        chunked(zlib.compress(body), size, b"/echo", b"Content-Encoding: deflate"),
        (200, body),
    ),
    "missing": lambda body, size: (post(body, b"/missing"), (404, error(b"missing"))),
    "missing, chunked": lambda body, size: (
        chunked(body, size, b"/missing"),
        (404, error(b"missing")),
    ),
    "full": lambda body, size: (post(body or b"x", b"/full"), (503, error(b"no memory"))),
    "wrong": lambda body, size: (post(body, b"/wrong"), (400, error(b"wrong"))),
}


@st.composite
def streams(draw, least=0, most=12):
    """Some requests, often the same again: heads that were met before take a path of their own."""
    different = draw(st.lists(exchanges(), min_size=least, max_size=4))
    if not different:
        return []
    return draw(st.lists(st.sampled_from(different), min_size=least, max_size=most))


@st.composite
def exchanges(draw):
    """One request as bytes, and the answer that is due."""
    body = some_bytes(draw(st.sampled_from([0, 1, 5, 300, 5_000, 16_384, 40_000])))
    make = EXCHANGES[draw(st.sampled_from(sorted(EXCHANGES)))]
    return make(body, draw(st.integers(1, 7_000)))


def cut(draw, stream):
    most = min(len(stream), 12)
    places = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=most)))
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@settings(max_examples=150)
@given(st.data(), streams(), st.booleans())
def test_answers_do_not_depend_on_how_the_stream_is_cut(data, requests, deferred):
    door = Door(deferred=deferred)
    pieces = cut(data.draw, b"".join(raw for raw, _ in requests))
    door.receive(*pieces)
    if deferred:
        waiting = [handler for handler in door.handlers if handler.exchange is not None]
        for handler in data.draw(st.permutations(waiting)):
            handler.answer()
    assert door.answers() == [due for _, due in requests]
    assert all(len(handler.ends) == 1 for handler in door.handlers)
    assert door.transport.state == "open"
    door.lose()
    assert all(len(handler.ends) == 1 for handler in door.handlers)
    assert not door.connections


@settings(max_examples=60)
@given(st.data(), streams(1, 6))
def test_lost_at_any_point_every_handler_has_exactly_one_end(data, requests):
    stream = b"".join(raw for raw, _ in requests)
    door = Door(deferred=True)
    door.receive(*cut(data.draw, stream[: data.draw(st.integers(0, len(stream)))]))
    before = [list(handler.ends) for handler in door.handlers]
    door.lose()
    for handler, ends in zip(door.handlers, before, strict=True):
        # Who has completed and not answered yet is told, too, that nobody waits any more.
        assert handler.ends == ends + (["aborted"] if ends in ([], ["completed"]) else [])


@settings(max_examples=60)
@given(st.data(), streams(1, 6))
def test_end_of_file_at_any_point_answers_what_was_whole(data, requests):
    stream = b"".join(raw for raw, _ in requests)
    stop = data.draw(st.integers(0, len(stream)))
    door = Door(deferred=True)
    door.receive(*cut(data.draw, stream[:stop]))
    door.end()
    for handler in door.handlers:
        if handler.ends == ["completed"]:
            handler.answer()
    whole, at = [], 0
    for raw, due in requests:
        at += len(raw)
        if at <= stop:
            whole.append(due)
    # A request may be refused by its head alone.
    assert door.answers()[: len(whole)] == whole
    assert len(door.answers()) <= len(whole) + 1
    assert door.transport.state == "closed"
    door.lose()
    assert all(
        handler.ends in (["completed"], ["aborted"], ["refused"]) for handler in door.handlers
    )


def test_a_body_that_follows_its_head_is_received_where_the_handler_says():
    door = Door(deferred=True)
    raw = post(b"a" * 50_000)
    head = raw[:-50_000]
    door.receive(head)
    assert door.connection.get_buffer(-1).obj is door.handlers[0].memory.obj
    door.receive(raw[len(head) :])
    assert door.handlers[0].body == b"a" * 50_000
    assert door.handlers[0].copied == 0


def test_of_a_body_that_comes_with_its_head_only_that_part_is_copied():
    door = Door()
    raw = post(b"a" * 50_000)
    door.receive(raw)
    assert door.handlers[0].copied == 16 * 1024 - (len(raw) - 50_000)


def test_lengths_and_fields_may_end_in_blanks():
    door = Door()
    door.receive(b"POST /echo HTTP/1.1\r\nContent-Length: 5  \r\n\r\nhello")
    assert door.answers() == [(200, b"hello")]


@pytest.mark.parametrize(
    ("version", "field", "closes", "says"),
    [
        (b"1.1", b"X: y", False, None),
        (b"1.1", b"Connection: close", True, b"close"),
        (b"1.1", b"Connection: CLOSE", True, b"close"),
        (b"1.0", b"X: y", True, b"close"),
        (b"1.0", b"Connection: keep-alive", False, b"keep-alive"),
    ],
)
def test_connection_ends_when_the_client_says_so(version, field, closes, says):
    door = Door()
    door.receive(post(b"abc", b"/echo", field, version=version), GET)
    answers = parse_answers(bytes(door.transport.sent))
    assert answers[0][2] == b"abc"
    assert answers[0][1].get(b"Connection") == says
    # What follows the last request is neither answered nor executed.
    assert len(answers) == len(door.handlers) == (1 if closes else 2)
    assert door.transport.state == ("closed" if closes else "open")


def test_an_early_answer_that_closes_waits_for_the_client_to_stop_sending():
    door = Door()
    raw = post(b"a" * 30_000, b"/missing", b"Connection: close")
    door.receive(raw[:5_000])
    assert door.transport.state == "half"
    door.receive(raw[5_000:])
    door.end()
    assert [status for status, _ in door.answers()] == [404]
    assert door.transport.state == "closed"


def test_a_body_that_comes_with_a_wish_to_upgrade_is_received():
    door = Door()
    raw = post(b"a" * 100, b"/echo", b"Connection: Upgrade", b"Upgrade: h2c")
    door.receive(raw[:20], raw[20:] + GET, raw[:-100], raw[-100:])
    assert door.answers() == [(200, b"a" * 100), (200, b""), (200, b"a" * 100)]


def test_a_chunked_body_that_comes_with_a_wish_to_upgrade_is_no_request():
    door = Door()
    door.receive(chunked(GET, 100, b"/echo", *UPGRADE) + GET)
    assert door.answers() == [(200, GET), (200, b"")]


@pytest.mark.parametrize("raw", [GET, post(b"abc"), post(b"a", b"/missing"), post(b"", b"/wrong")])
def test_the_same_request_again_is_answered_again(raw):
    door = Door()
    door.receive(raw * 3, *[raw] * 3, raw[:10], raw[10:] + raw)
    assert len(door.answers()) == 8
    assert len(set(door.answers())) == 1


def test_nearly_the_same_request_is_another_one():
    door = Door()
    door.receive(post(b"abc"), post(b"abcd"), post(b"abc", b"/missing"), post(b"xyz"), GET)
    door.receive(b"GET /echo HTTP/1.0\r\n\r\n")
    assert [body for _, body in door.answers()][:2] == [b"abc", b"abcd"]
    assert [status for status, _ in door.answers()] == [200, 200, 404, 200, 200, 200]
    assert door.transport.state == "closed"


def test_head_is_answered_without_a_body():
    door = Door()
    door.receive(b"HEAD /missing HTTP/1.1\r\n\r\n")
    assert door.transport.sent.startswith(b"HTTP/1.1 404")
    assert door.transport.sent.endswith(b"Content-Length: 19\r\n\r\n")


def test_connect_is_answered_and_closes():
    door = Door()
    door.receive(b"CONNECT x:80 HTTP/1.1\r\n\r\n" + GET)
    assert len(door.answers()) == 1
    assert door.transport.state == "closed"


def test_expectation_is_met_before_the_body_comes():
    door = Door()
    raw = post(b"abc", b"/echo", b"Expect: 100-continue")
    door.receive(raw[:-3])
    assert door.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    door.receive(raw[-3:])
    assert door.answers() == [(200, b"abc")]


def test_refused_requests_are_not_told_to_go_on():
    door = Door()
    door.receive(post(b"abc", b"/missing", b"Expect: 100-continue")[:-3])
    assert b"100 Continue" not in door.transport.sent
    assert door.answers()[0][0] == 404


def test_accepted_codings_compress_answers_but_no_errors():
    door = Door()
    door.receive(
        post(b"a" * 5_000, b"/echo", b"Accept-Encoding: br, gzip;q=0.5"),
        post(b"a", b"/missing", b"Accept-Encoding: gzip"),
    )
    (_, first, body), (_, second, _) = parse_answers(bytes(door.transport.sent))
    assert first[b"Content-Encoding"] == b"gzip"
    assert int(first[b"Content-Length"]) < 100
    assert body == b"a" * 5_000
    assert b"Content-Encoding" not in second


def test_short_buffers_are_sent_together():
    door = Door(deferred=True)
    door.receive(GET)
    long = bytes(range(256)) * 16
    buffers = [b"%03d" % i for i in range(600)] + [long] + [b"%03d" % i for i in range(600)]
    door.handlers[0].exchange.respond(200, b"Content-Type: x\r\n", b"{}", buffers)
    assert door.answers() == [(200, b"{}" + b"".join(buffers))]
    assert door.transport.writes == 3


def test_a_slow_reader_is_read_from_no_more_until_it_catches_up():
    door = Door()
    door.connection.pause_writing()
    door.receive(GET * 3)
    assert door.undelivered == [GET * 3]
    assert not door.handlers
    door.connection.resume_writing()
    door.receive(GET)
    assert len(door.answers()) == 4


def test_many_unanswered_requests_stop_reading():
    door = Door(deferred=True)
    door.receive(*[GET] * 100)
    assert len(door.handlers) == 32
    door.handlers[0].answer()
    door.receive()
    assert len(door.handlers) == 33
    for number in range(1, 100):
        door.handlers[number].answer()
        door.receive()
    assert len(door.answers()) == 100
    assert not door.undelivered


def test_draining_answers_what_is_asked_and_closes():
    door = Door(deferred=True)
    raw = post(b"abc")
    door.receive(GET, raw[:-1])
    door.connection.drain()
    door.handlers[0].answer()
    assert door.transport.state == "open"
    door.receive(raw[-1:])
    door.handlers[1].answer()
    assert [status for status, _ in door.answers()] == [200, 200]
    assert door.transport.state == "closed"


@pytest.mark.parametrize("before", [b"", GET[:10]])
def test_draining_closes_idle_connections_at_once(before):
    door = Door()
    door.receive(before)
    door.connection.drain()
    assert door.transport.state == "closed"


def test_draining_does_not_wait_for_clients_that_are_being_refused():
    door = Door()
    door.receive(b"junk\r\n\r\n")
    assert door.transport.state == "half"
    door.connection.drain()
    assert door.transport.state == "closed"


def test_draining_closes_when_the_rest_of_a_refused_body_has_come():
    door = Door()
    raw = post(b"abc", b"/missing")
    door.receive(raw[:-1])
    door.connection.drain()
    door.receive(raw[-1:])
    assert door.transport.state == "closed"


def test_a_fault_in_a_handler_is_not_taken_for_a_malformed_request():
    class Failing(Door):
        def route(self, head):
            raise ZeroDivisionError

    door = Failing()
    door.receive(GET + GET)
    answers = door.answers()
    assert [status for status, _ in answers] == [500, 500]
    assert all(b"ZeroDivisionError" in str(body).encode() for _, body in answers)
    assert door.transport.state == "open"


def test_a_client_that_has_ended_is_not_waited_for_after_its_last_answer():
    door = Door(deferred=True)
    # The second is malformed, so that its client might go on sending: but it has said all it will.
    door.receive(GET + b"nonsense\r\n\r\n")
    door.end()
    assert door.transport.state == "open"
    door.handlers[0].answer()
    assert [status for status, _ in door.answers()] == [200, 400]
    assert door.transport.state == "closed"
