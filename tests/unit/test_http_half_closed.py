"""Clients that send no more: gone, or waiting for their answers."""

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.http_endpoint import GET, Endpoint, error, post

CLOSED, CLOSE_WAIT = 7, 8
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
FILLER = b":\n\n"
BODY = b"x" * 10


def asked(count=1, version=b"1.1"):
    """A connection whose client has asked so often and sends no more."""
    endpoint = Endpoint(deferred=True)
    endpoint.receive(*[post(BODY, version=version)] * count)
    endpoint.end()
    endpoint.transport.kernel = CLOSE_WAIT
    return endpoint


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_waits_gets_its_answers_whole(version):
    endpoint = asked(2 if version == b"1.1" else 1, version)
    for _ in range(3):
        endpoint.connection.check(0.0)
    assert endpoint.transport.sent == (PROBE if version == b"1.1" else b""), "once for an answer"
    for handler in endpoint.handlers:
        assert handler.ends == ["completed"]
        handler.answer()
    assert endpoint.answers() == [(200, BODY)] * len(endpoint.handlers)
    assert endpoint.transport.state == "closed"


def test_each_answer_that_is_waited_for_is_probed():
    endpoint = asked(3)
    for handler in endpoint.handlers:
        endpoint.connection.check(0.0)
        assert endpoint.transport.sent.endswith(PROBE)
        handler.answer()
    assert endpoint.answers() == [(200, BODY)] * 3


def test_an_answer_that_is_an_error_is_whole_too():
    endpoint = asked()
    endpoint.connection.check(0.0)
    endpoint.handlers[0].exchange.fail(BridgeError("wrong", ErrorCode.INVALID_ARG))
    assert endpoint.answers() == [(400, error(b"wrong"))]


def test_a_client_that_is_gone_is_told_to_the_handlers():
    endpoint = asked(2)
    endpoint.connection.check(0.0)
    endpoint.transport.kernel = CLOSED
    endpoint.connection.check(1.0)
    assert endpoint.transport.state == "closed"
    endpoint.lose()
    assert [handler.ends for handler in endpoint.handlers] == [["completed", "aborted"]] * 2


def test_a_client_whose_end_is_behind_what_is_not_read_is_looked_for():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(*[GET] * 40)
    endpoint.connection.pause_writing()
    assert not endpoint.transport.reading
    endpoint.connection.check(0.0)
    assert not endpoint.transport.sent, "it may send more"
    endpoint.transport.kernel = CLOSE_WAIT
    endpoint.connection.check(1.0)
    assert endpoint.transport.sent == PROBE
    endpoint.transport.kernel = CLOSED
    endpoint.connection.check(2.0)
    assert endpoint.transport.state == "closed"


def test_nothing_is_asked_of_the_kernel_while_requests_may_come():
    endpoint = Endpoint(deferred=True)
    endpoint.receive(GET)
    endpoint.transport.kernel = CLOSED
    endpoint.connection.check(0.0)
    assert endpoint.transport.state == "open"


def test_nothing_more_is_sent_to_a_client_that_has_to_take_what_was():
    endpoint = asked()
    endpoint.transport.unsent = 1
    endpoint.connection.check(0.0)
    assert not endpoint.transport.sent


def stream_of(endpoint):
    """Status line and chunks of the one answer, without interim ones."""
    head, _, body = bytes(endpoint.transport.sent).removeprefix(PROBE).partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


def test_a_stream_that_has_begun_is_filled():
    endpoint = asked()
    exchange = endpoint.handlers[0].exchange
    exchange.begin(200, b"", lambda: None, FILLER)
    for _ in range(2):
        endpoint.connection.check(0.0)
    exchange.send((b"abc",))
    endpoint.connection.check(0.0)
    exchange.end()
    filled = b"3\r\n" + FILLER + b"\r\n"
    chunks = filled + b"3\r\nabc\r\n" + filled + b"0\r\n\r\n"
    assert stream_of(endpoint) == (b"HTTP/1.1 200 OK", chunks)


def test_a_stream_that_has_not_begun_stays_whole():
    endpoint = asked()
    endpoint.connection.check(0.0)
    exchange = endpoint.handlers[0].exchange
    exchange.begin(200, b"", lambda: None, FILLER)
    exchange.send((b"abc",))
    exchange.end()
    assert stream_of(endpoint) == (b"HTTP/1.1 200 OK", b"3\r\nabc\r\n0\r\n\r\n")


def test_a_stream_that_nothing_can_be_put_into_is_left_alone():
    endpoint = asked()
    endpoint.handlers[0].exchange.begin(200, b"", lambda: None)
    sent = bytes(endpoint.transport.sent)
    endpoint.connection.check(0.0)
    assert endpoint.transport.sent == sent
