"""HttpConnection fed by hand: framing, order, limits, and what becomes of handlers."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.http_door import BODY_LIMIT, Door, parse_answers

GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body, target=b"/echo", *fields, version=b"1.1"):
    lines = [b"POST " + target + b" HTTP/" + version, b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join([*lines, b"", body])


def chunked(body, size, target=b"/echo", *fields, trailer=b""):
    lines = [b"POST " + target + b" HTTP/1.1", b"Transfer-Encoding: chunked", *fields]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"\r\n".join([*lines, b"", chunks]) + b"0\r\n" + trailer + b"\r\n"


def error(text):
    return b'{"error":"' + text + b'"}'


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
def exchanges(draw):
    """One request as bytes, and the answer that is due."""
    body = some_bytes(draw(st.sampled_from([0, 1, 5, 300, 5_000, 16_384, 40_000])))
    make = EXCHANGES[draw(st.sampled_from(sorted(EXCHANGES)))]
    return make(body, draw(st.integers(1, 7_000)))


def cut(draw, stream):
    most = min(len(stream), 12)
    places = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=most)))
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(exchanges(), max_size=12), st.booleans())
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


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(exchanges(), min_size=1, max_size=6))
def test_lost_at_any_point_every_handler_has_exactly_one_end(data, requests):
    stream = b"".join(raw for raw, _ in requests)
    door = Door(deferred=True)
    door.receive(*cut(data.draw, stream[: data.draw(st.integers(0, len(stream)))]))
    before = [list(handler.ends) for handler in door.handlers]
    door.lose()
    for handler, ends in zip(door.handlers, before, strict=True):
        # Who has completed and not answered yet is told, too, that nobody waits any more.
        assert handler.ends == ends + (["aborted"] if ends in ([], ["completed"]) else [])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(exchanges(), min_size=1, max_size=6))
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


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x00\x01garbage\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\x05hello", 400),
        (post(b"abc", b"/echo", b"Content-Length: 3"), 400),
        (post(b"abc", b"/echo", b"Content-Length: 4"), 400),
        (post(b"abc", b"/echo", b"Transfer-Encoding: chunked"), 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: abc\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 413),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 9999999999999999999\r\n\r\n", 413),
        (b"POST /echo HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), 413),
        (chunked(b"a" * (BODY_LIMIT + 1), 9_000), 413),
        (b"GET /echo HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
        (b"GET /" + b"a" * 70_000, 431),
        (b"X" * 70_000, 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 70_000, 431),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x=" + b"a" * 90_000, 431),
    ],
)
@pytest.mark.parametrize("piece", [1 << 20, 1])
def test_what_cannot_be_read_is_refused_once_and_nothing_after_it_is_looked_at(raw, status, piece):
    door = Door()
    stream = raw + b"\r\n\r\n" + GET
    if piece == 1:
        stream = stream[:200] if len(stream) < 1000 else stream
    door.receive(*(stream[at : at + piece] for at in range(0, len(stream), piece)))
    assert [answer[0] for answer in door.answers()] == [status]
    assert b"Connection: close\r\n" in door.transport.sent
    assert all(handler.ends == ["aborted"] for handler in door.handlers)
    # The answer would be lost to a client that is still sending if this end closed first.
    assert door.transport.state == "half"
    door.end()
    assert door.transport.state == "closed"


def test_a_refused_message_waits_for_the_answers_before_it():
    door = Door(deferred=True)
    door.receive(GET, b"junk\r\n\r\n", GET)
    assert door.answers() == []
    assert len(door.handlers) == 1
    door.handlers[0].answer()
    assert [status for status, _ in door.answers()] == [200, 400]


def test_a_broken_body_of_a_refused_request_is_not_answered_twice():
    door = Door()
    door.receive(chunked(b"a" * 10, 5, b"/missing")[:-15] + b"zz\r\n")
    assert [status for status, _ in door.answers()] == [404]
    assert door.transport.state == "half"


def test_no_memory_of_an_aborted_handler_is_written_to():
    door = Door()
    door.receive(post(b"a" * 30_000)[:-10_000])
    memory = door.handlers[0].memory
    door.lose()
    before = bytes(memory)
    memory[:] = b"z" * len(memory)
    assert before != bytes(memory)
    assert door.connection.get_buffer(-1) is not memory
    assert len(door.connection.get_buffer(-1)) == 16 * 1024


def test_head_of_nearly_the_limit_is_taken():
    door = Door()
    door.receive(b"GET /echo HTTP/1.1\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
    assert door.answers() == [(200, b"")]


def test_body_of_the_limit_is_taken():
    door = Door()
    body = b"a" * BODY_LIMIT
    door.receive(post(body), chunked(body, 5_000), post(gzip.compress(body), b"/echo"))
    assert [status for status, _ in door.answers()] == [200, 200, 200]


def test_decompression_stops_at_the_limit():
    door = Door()
    bomb = gzip.compress(b"\0" * (BODY_LIMIT + 1))
    door.receive(post(bomb, b"/echo", b"Content-Encoding: gzip"))
    assert door.answers()[0][0] == 400
    assert b"longer than the limit of 100000" in door.answers()[0][1]
    assert door.handlers[0].ends == ["aborted"]
    assert door.handlers[0].memory is None


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        (b"gzip", b"plain", 400),
        (b"deflate", zlib.compress(b"x" * 100, wbits=-15), 400),
        (b"gzip", gzip.compress(b"x" * 1000)[:-12], 400),
        (b"br", b"x", 501),
        (b"gzip, deflate", b"x", 501),
        (b"", b"x", 501),
        (b"identity", b"x", 200),
        (b"GZIP", gzip.compress(b"x"), 200),
    ],
)
def test_content_codings(coding, body, status):
    door = Door()
    door.receive(post(body, b"/echo", b"Content-Encoding: " + coding), GET)
    assert [answer[0] for answer in door.answers()] == [status, 200]


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


def test_a_chunked_body_with_a_wish_to_upgrade_is_refused():
    # The parser would take its chunks for requests.
    door = Door()
    door.receive(chunked(GET, 100, b"/echo", b"Connection: Upgrade", b"Upgrade: h2c"))
    assert [status for status, _ in door.answers()] == [501]
    assert not door.handlers


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
    door = Door()

    def fail(head):
        raise ZeroDivisionError

    door.route = fail
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what is raised is httptools' affair
        door.receive(GET)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not door.transport.sent
