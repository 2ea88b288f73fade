"""Refusals of HttpConnection, and their effect on the connection and its handlers."""

import gzip

import pytest

from tests.unit.http_endpoint import BODY_LIMIT, GET, Endpoint, chunked, post


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x00\x01garbage\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (post(b"abc", b"/echo", b"Content-Length: 4"), 400),
        (post(b"abc", b"/echo", b"Transfer-Encoding: chunked"), 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc", 400),
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
def test_unreadable_bytes_are_refused_once_and_end_the_reading(raw, status, piece):
    endpoint = Endpoint()
    stream = raw + b"\r\n\r\n" + GET
    if piece == 1 and len(stream) > 1000:
        # Byte by byte it would be tens of thousands of calls.
        piece = 97
    endpoint.receive(*(stream[at : at + piece] for at in range(0, len(stream), piece)))
    assert [answer[0] for answer in endpoint.answers()] == [status]
    assert b"Connection: close\r\n" in endpoint.transport.sent
    assert all(handler.ends == ["aborted"] for handler in endpoint.handlers)
    # The answer would be lost to a client that is still sending if this end closed first.
    assert endpoint.transport.state == "half"
    endpoint.end()
    assert endpoint.transport.state == "closed"


def test_a_refused_message_waits_for_the_answers_before_it():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET, b"junk\r\n\r\n", GET)
    assert endpoint.answers() == []
    assert len(endpoint.handlers) == 1
    endpoint.handlers[0].answer()
    assert [status for status, _ in endpoint.answers()] == [200, 400]


def test_a_broken_body_of_a_refused_request_is_not_answered_twice():
    endpoint = Endpoint()
    endpoint.receive(chunked(b"a" * 10, 5, b"/missing")[:-15] + b"zz\r\n")
    assert [status for status, _ in endpoint.answers()] == [404]
    assert endpoint.transport.state == "half"


def test_no_memory_of_an_aborted_handler_is_written_to():
    endpoint = Endpoint()
    endpoint.receive(post(b"a" * 30_000)[:-10_000])
    memory = endpoint.handlers[0].memory
    endpoint.lose()
    before = bytes(memory)
    memory[:] = b"z" * len(memory)
    assert before != bytes(memory)
    assert endpoint.connection.get_buffer(-1) is not memory
    assert len(endpoint.connection.get_buffer(-1)) == 16 * 1024


def test_head_of_nearly_the_limit_is_taken():
    endpoint = Endpoint()
    endpoint.receive(b"GET /echo HTTP/1.1\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
    assert endpoint.answers() == [(200, b"")]


def test_body_of_the_limit_is_taken():
    endpoint = Endpoint()
    body = b"a" * BODY_LIMIT
    endpoint.receive(post(body), chunked(body, 5_000), post(gzip.compress(body), b"/echo"))
    assert [status for status, _ in endpoint.answers()] == [200, 200, 200]


def test_decompression_stops_at_the_limit():
    endpoint = Endpoint()
    bomb = gzip.compress(b"\0" * (BODY_LIMIT + 1))
    endpoint.receive(post(bomb, b"/echo", b"Content-Encoding: gzip"))
    assert endpoint.answers()[0][0] == 400
    assert b"longer than the limit of 100000" in endpoint.answers()[0][1]
    assert endpoint.handlers[0].ends == ["aborted"]
    assert endpoint.handlers[0].memory is None
