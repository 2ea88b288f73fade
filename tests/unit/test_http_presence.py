"""Clients that send no more: gone, or waiting for their answers."""

from __future__ import annotations

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.http_door import GET, Door, error, parse_answers, post

CLOSED, CLOSE_WAIT = 7, 8
AHEAD = b"HTTP/1.1 "
BODY = b"x" * 10


def asked(count=1, version=b"1.1"):
    """A connection whose client has asked so often and sends no more."""
    door = Door(deferred=True)
    door.receive(*[post(BODY, version=version)] * count)
    door.end()
    door.transport.kernel = CLOSE_WAIT
    return door


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_waits_gets_its_answers_whole(version):
    door = asked(2 if version == b"1.1" else 1, version)
    for _ in range(3):
        door.connection.check(0.0)
    assert door.transport.sent == AHEAD, "once for an answer"
    for handler in door.handlers:
        assert handler.ends == ["completed"]
        handler.answer()
    assert door.answers() == [(200, BODY)] * len(door.handlers)
    assert door.transport.state == "closed"


def test_each_answer_that_is_waited_for_is_foretold():
    door = asked(3)
    for handler in door.handlers:
        door.connection.check(0.0)
        assert door.transport.sent.endswith(AHEAD)
        handler.answer()
    assert door.answers() == [(200, BODY)] * 3


def test_an_answer_that_is_an_error_is_whole_too():
    door = asked()
    door.connection.check(0.0)
    door.handlers[0].exchange.fail(BridgeError("wrong", ErrorCode.INVALID_ARG))
    assert door.answers() == [(400, error(b"wrong"))]


def test_a_client_that_is_gone_is_told_to_the_handlers():
    door = asked(2)
    door.connection.check(0.0)
    door.transport.kernel = CLOSED
    door.connection.check(1.0)
    assert door.transport.state == "closed"
    door.lose()
    assert [handler.ends for handler in door.handlers] == [["completed", "aborted"]] * 2


def test_a_client_whose_end_is_behind_what_is_not_read_is_looked_for():
    door = Door(deferred=True)
    door.receive(*[GET] * 40)
    assert not door.transport.reading
    door.connection.check(0.0)
    assert not door.transport.sent, "it may send more"
    door.transport.kernel = CLOSE_WAIT
    door.connection.check(1.0)
    assert door.transport.sent == AHEAD
    door.transport.kernel = CLOSED
    door.connection.check(2.0)
    assert door.transport.state == "closed"


def test_nothing_is_asked_of_the_kernel_while_requests_may_come():
    door = Door(deferred=True)
    door.receive(GET)
    door.transport.kernel = CLOSED
    door.connection.check(0.0)
    assert door.transport.state == "open"


def test_nothing_more_is_sent_to_a_client_that_has_to_take_what_was():
    door = asked()
    door.transport.unsent = 1
    door.connection.check(0.0)
    assert not door.transport.sent


def test_a_stream_that_has_begun_stays_whole():
    door = asked()
    exchange = door.handlers[0].exchange
    exchange.begin(200, b"", lambda: None)
    for piece in (b"abc", b"d" * 20):
        for _ in range(2):
            door.connection.check(0.0)
        exchange.send(piece)
    door.connection.check(0.0)
    exchange.end()
    head, _, body = bytes(door.transport.sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"03\r\nabc\r\n014\r\n" + b"d" * 20 + b"\r\n00\r\n\r\n"


def test_a_stream_that_has_not_begun_stays_whole():
    door = asked()
    door.connection.check(0.0)
    exchange = door.handlers[0].exchange
    exchange.begin(200, b"", lambda: None)
    exchange.send(b"abc")
    exchange.end()
    assert door.transport.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert door.transport.sent.endswith(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")


def test_a_stream_without_chunks_is_left_alone():
    door = asked(version=b"1.0")
    exchange = door.handlers[0].exchange
    exchange.begin(200, b"", lambda: None)
    sent = bytes(door.transport.sent)
    door.connection.check(0.0)
    assert door.transport.sent == sent


def test_every_answer_begins_as_foretold():
    door = Door()
    door.receive(GET, b"GET /missing HTTP/1.1\r\n\r\n", GET.replace(b"1.1", b"1.0"))
    assert len(parse_answers(bytes(door.transport.sent))) == 3
    assert door.transport.sent.count(AHEAD) == 3
