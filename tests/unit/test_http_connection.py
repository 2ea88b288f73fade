"""HttpConnection fed by hand: framing, order, limits, and what becomes of handlers."""

import gzip
import random
import zlib

import pytest
from hypothesis import given, strategies as st

from tests.unit.http_endpoint import GET, Endpoint, chunked, error, post


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
    "chunked upgrade": lambda body, size: (chunked(body, size, b"/echo", *UPGRADE), (200, body)),
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


@given(st.data(), streams(), st.booleans())
def test_answers_do_not_depend_on_how_the_stream_is_cut(data, requests, deferred):
    endpoint = Endpoint(deferred=deferred)
    pieces = cut(data.draw, b"".join(raw for raw, _ in requests))
    endpoint.receive(*pieces)
    if deferred:
        waiting = [handler for handler in endpoint.handlers if handler.exchange is not None]
        for handler in data.draw(st.permutations(waiting)):
            handler.answer()
    assert endpoint.answers() == [due for _, due in requests]
    assert all(len(handler.ends) == 1 for handler in endpoint.handlers)
    assert endpoint.transport.state == "open"
    endpoint.lose()
    assert all(len(handler.ends) == 1 for handler in endpoint.handlers)
    assert not endpoint.connections


def test_a_body_that_follows_its_head_is_received_where_the_handler_says():
    endpoint = Endpoint(deferred=True)
    raw = post(b"a" * 50_000)
    head = raw[:-50_000]
    endpoint.receive(head)
    assert endpoint.connection.get_buffer(-1).obj is endpoint.handlers[0].memory.obj
    endpoint.receive(raw[len(head) :])
    assert endpoint.handlers[0].body == b"a" * 50_000
    assert endpoint.handlers[0].copied == 0


def test_of_a_body_that_comes_with_its_head_only_that_part_is_copied():
    endpoint = Endpoint()
    raw = post(b"a" * 50_000)
    endpoint.receive(raw)
    assert endpoint.handlers[0].copied == 16 * 1024 - (len(raw) - 50_000)


def test_an_early_answer_that_closes_waits_for_the_client_to_stop_sending():
    endpoint = Endpoint()
    raw = post(b"a" * 30_000, b"/missing", b"Connection: close")
    endpoint.receive(raw[:5_000])
    assert endpoint.transport.state == "half"
    endpoint.receive(raw[5_000:])
    endpoint.end()
    assert [status for status, _ in endpoint.answers()] == [404]
    assert endpoint.transport.state == "closed"


def test_connect_is_answered_and_closes():
    endpoint = Endpoint()
    endpoint.receive(b"CONNECT x:80 HTTP/1.1\r\n\r\n" + GET)
    assert len(endpoint.answers()) == 1
    assert endpoint.transport.state == "closed"


def test_refused_requests_are_not_told_to_go_on():
    endpoint = Endpoint()
    endpoint.receive(post(b"abc", b"/missing", b"Expect: 100-continue")[:-3])
    assert b"100 Continue" not in endpoint.transport.sent
    assert endpoint.answers()[0][0] == 404


def test_short_buffers_are_sent_together():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET)
    long = bytes(range(256)) * 16
    buffers = [b"%03d" % i for i in range(600)] + [long] + [b"%03d" % i for i in range(600)]
    endpoint.handlers[0].exchange.respond(200, b"Content-Type: x\r\n", b"{}", buffers)
    assert endpoint.answers() == [(200, b"{}" + b"".join(buffers))]
    assert endpoint.transport.writes == 3


def test_a_slow_reader_is_read_from_no_more_until_it_catches_up():
    endpoint = Endpoint()
    endpoint.connection.pause_writing()
    endpoint.receive(GET * 3)
    assert endpoint.undelivered == [GET * 3]
    assert not endpoint.handlers
    endpoint.connection.resume_writing()
    endpoint.receive(GET)
    assert len(endpoint.answers()) == 4


def test_draining_answers_what_is_asked_and_closes():
    endpoint = Endpoint(deferred=True)
    raw = post(b"abc")
    endpoint.receive(GET, raw[:-1])
    endpoint.connection.drain()
    endpoint.handlers[0].answer()
    assert endpoint.transport.state == "open"
    endpoint.receive(raw[-1:])
    endpoint.handlers[1].answer()
    assert [status for status, _ in endpoint.answers()] == [200, 200]
    assert endpoint.transport.state == "closed"


@pytest.mark.parametrize(
    ("before", "state"), [(b"", "open"), (GET[:10], "open"), (b"junk\r\n\r\n", "half")]
)
def test_draining_closes_idle_and_refused_connections_at_once(before, state):
    endpoint = Endpoint()
    endpoint.receive(before)
    assert endpoint.transport.state == state
    endpoint.connection.drain()
    assert endpoint.transport.state == "closed"


def test_draining_closes_when_the_rest_of_a_refused_body_has_come():
    endpoint = Endpoint()
    raw = post(b"abc", b"/missing")
    endpoint.receive(raw[:-1])
    endpoint.connection.drain()
    endpoint.receive(raw[-1:])
    assert endpoint.transport.state == "closed"


def test_a_fault_in_a_handler_is_not_taken_for_a_malformed_request():
    class Failing(Endpoint):
        def route(self, head):
            raise ZeroDivisionError

    endpoint = Failing()
    endpoint.receive(GET + GET)
    answers = endpoint.answers()
    assert [status for status, _ in answers] == [500, 500]
    assert all(b"ZeroDivisionError" in str(body).encode() for _, body in answers)
    assert endpoint.transport.state == "open"


def test_a_client_that_has_ended_is_not_waited_for_after_its_last_answer():
    endpoint = Endpoint(deferred=True)
    # The second is malformed, so that its client might go on sending: but it has said all it will.
    endpoint.receive(GET + b"nonsense\r\n\r\n")
    endpoint.end()
    assert endpoint.transport.state == "open"
    endpoint.handlers[0].answer()
    assert [status for status, _ in endpoint.answers()] == [200, 400]
    assert endpoint.transport.state == "closed"


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECTS = post(b"abc", b"/echo", b"Expect: 100-continue")


def test_a_client_is_told_to_go_on_behind_the_answers_before():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET, GET, EXPECTS[:-3])
    first, second, third = endpoint.handlers
    first.exchange.begin(200, b"", lambda: None)
    first.exchange.send((b"one",))
    second.answer()
    assert CONTINUE not in endpoint.transport.sent
    first.exchange.send((b"two",))
    before = bytes(endpoint.transport.sent)
    assert CONTINUE not in before
    first.exchange.end()
    assert endpoint.transport.sent.startswith(before + b"0\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert endpoint.transport.sent.endswith(CONTINUE)
    endpoint.receive(EXPECTS[-3:])
    third.answer()
    assert endpoint.transport.sent.count(CONTINUE) == 1
    assert endpoint.transport.sent.endswith(b"abc")


@pytest.mark.parametrize("sent", [EXPECTS[:-2], EXPECTS])
def test_a_client_that_does_not_wait_is_not_told_to_go_on_later(sent):
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET, sent)
    endpoint.handlers[0].answer()
    endpoint.receive(EXPECTS[len(sent) :])
    endpoint.handlers[1].answer()
    assert CONTINUE not in endpoint.transport.sent
    assert endpoint.answers() == [(200, b""), (200, b"abc")]


def test_a_client_that_waits_for_its_turn_to_go_on_is_not_late():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET, EXPECTS[:-3])
    for seconds in range(0, 10_000, 100):
        endpoint.connection.check(float(seconds))
    endpoint.handlers[0].answer()
    assert endpoint.transport.sent.endswith(CONTINUE)
    endpoint.receive(EXPECTS[-3:])
    endpoint.handlers[1].answer()
    assert endpoint.answers() == [(200, b""), (200, b"abc")]


def test_a_client_whose_request_is_refused_while_it_waits_is_not_told_to_go_on():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET, EXPECTS[:-3])
    endpoint.connection.finish()
    endpoint.handlers[0].answer()
    assert CONTINUE not in endpoint.transport.sent
    assert [status for status, _ in endpoint.answers()] == [200, 503]
