"""HttpConnection.check: who is late is told so, or cut off; who is not is left alone."""

from __future__ import annotations

import asyncio

import pytest

from gpubridge.config import HttpConnections
from tests.unit.http_door import GET, Door, post

LIMITS = HttpConnections(
    max_connections=2, header_timeout=10, body_timeout=20, idle_timeout=100, send_timeout=30
)
HALF_HEAD = b"GET /echo HTTP/1.1\r\nHost"


@pytest.fixture
def door():
    return Door(connections=LIMITS)


def check(door, *times):
    for time in times:
        if door.transport.state != "closed":
            door.connection.check(time)


def test_a_slow_head_is_refused(door):
    door.receive(HALF_HEAD)
    check(door, 1, 10.9)
    door.receive(b": x\r\nX-More")
    check(door, 10.95)
    assert door.answers() == []
    check(door, 11)
    ((status, body),) = door.answers()
    assert (status, b"whole head of a request within 10 s" in body) == (408, True)
    # It is dropped what comes; a client that does not close is cut off.
    assert door.transport.state == "half"
    door.receive(b": y\r\n\r\n")
    check(door, 12, 21)
    assert door.transport.state == "half"
    check(door, 22)
    assert door.transport.state == "closed"


def test_heads_that_follow_each_other_are_not_one_slow_head(door):
    for time in range(0, 50, 2):
        door.receive(HALF_HEAD)
        check(door, time)
        door.receive(b": x\r\n\r\n")
    assert [status for status, _ in door.answers()] == [200] * 25


def test_a_slow_body_is_refused_and_its_memory_given_up(door):
    door.receive(post(b"x" * 50_000)[:100])
    for time in range(20):
        check(door, time)
        door.receive(b"y")
    assert door.answers() == []
    check(door, 20)
    ((status, body),) = door.answers()
    assert (status, b"500 bytes a second" in body) == (408, True)
    assert door.handlers[0].ends == ["aborted"]


def test_a_body_that_comes_fast_enough_is_not(door):
    request = post(b"x" * 50_000)
    door.receive(request[:100])
    for time, start in enumerate(range(100, len(request), 600)):
        check(door, time)
        door.receive(request[start : start + 600])
    assert time > 60
    assert door.answers() == [(200, b"x" * 50_000)]


def test_a_slow_body_in_chunks_is_refused(door):
    door.receive(b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for time in range(21):
        check(door, time)
        door.receive(b"1\r\nx\r\n")
    assert door.answers()[0][0] == 408


def test_an_idle_connection_is_closed(door):
    check(door, 0, 99)
    door.receive(GET)
    check(door, 100, 199)
    assert door.transport.state == "open"
    check(door, 200)
    assert door.transport.state == "closed"
    assert len(door.answers()) == 1


def test_a_request_that_is_executed_is_never_late():
    door = Door(deferred=True, connections=LIMITS)
    door.receive(post(b"body"))
    check(door, *range(0, 100_000, 1000))
    assert door.transport.state == "open"
    door.handlers[0].answer()
    assert door.answers() == [(200, b"body")]


def test_nothing_is_late_while_we_do_not_read():
    door = Door(deferred=True, connections=LIMITS)
    slow = post(b"x" * 50_000)
    door.receive(*[post(b"body")] * 31, slow[:60])
    assert not door.transport.reading
    check(door, *range(0, 1000, 10))
    door.handlers[0].answer()
    check(door, 1000, 1019)
    door.receive(slow[60:])
    for handler in door.handlers[1:]:
        handler.answer()
    assert [status for status, _ in door.answers()] == [200] * 32


def test_a_client_that_does_not_take_its_answers_is_cut_off(door):
    door.receive(GET)
    door.transport.unsent = 100_000
    check(door, 0, 29)
    # Slowly is not enough, ...
    door.transport.unsent -= 10_000
    check(door, 29.5)
    assert door.transport.state == "open"
    check(door, 30)
    assert door.transport.state == "closed"


def test_a_client_that_takes_its_answers_fast_enough_is_not(door):
    door.receive(GET)
    for time in range(0, 200, 10):
        door.transport.unsent = 500_000 - 510 * time
        check(door, time)
    assert door.transport.state == "open"


@pytest.mark.parametrize(("rate", "state"), [(600, "closed"), (61_000, "open")])
def test_a_client_that_leaves_much_unread_has_to_take_it_faster(door, rate, state):
    door.receive(GET)
    for time in range(0, 200, 10):
        door.transport.unsent = (60 << 20) - rate * time
        check(door, time)
    assert door.transport.state == state


def test_zero_is_no_limit():
    door = Door(
        connections=HttpConnections(
            max_connections=0, header_timeout=0, body_timeout=0, idle_timeout=0, send_timeout=0
        )
    )
    check(door, 0, 1e6)
    door.receive(HALF_HEAD)
    check(door, 2e6, 3e6)
    door.transport.unsent = 100
    check(door, 4e6, 5e6)
    assert door.transport.state == "open"


def busy_door(beside=None):
    """A connection with a request that is being executed."""
    door = Door(deferred=True, connections=LIMITS, beside=beside)
    door.receive(GET)
    return door


def test_too_many_connections():
    first = busy_door()
    others = [busy_door(first)]
    others += [Door(connections=LIMITS, beside=first) for _ in range(66)]
    assert others[0].answers() == []
    for told in others[1:65]:
        ((status, body),) = told.answers()
        assert (status, b"2 connections" in body) == (503, True)
    assert others[66].transport.sent == b""
    assert others[66].transport.state == "closed"
    # The first goes, and there is room again.
    for door in others[1:]:
        door.lose()
    first.lose()
    last = Door(connections=LIMITS, beside=first)
    last.receive(GET)
    assert last.answers() == [(200, b"")]


def test_the_longest_idle_connection_makes_room():
    first = Door(connections=LIMITS)
    second = Door(connections=LIMITS, beside=first)
    # Now the second one is idle for longer.
    first.receive(GET)
    third = Door(connections=LIMITS, beside=first)
    assert [door.transport.state for door in (first, second, third)] == ["open", "closed", "open"]
    second.lose()
    third.receive(GET)
    fourth = Door(connections=LIMITS, beside=first)
    assert [door.transport.state for door in (first, third, fourth)] == ["closed", "open", "open"]
    first.lose()
    for door in (third, fourth):
        door.receive(GET)
        assert door.answers()[-1] == (200, b"")
    assert first.connections == {third.connection, fourth.connection}


def head_begun(door):
    door.receive(GET, HALF_HEAD)


def body_begun(door):
    door.receive(post(b"abc")[:-1])


def waiting(door):
    door.deferred = True
    door.receive(GET)


def unsent(door):
    door.receive(GET)
    door.transport.unsent = 1


@pytest.mark.parametrize("keep_busy", [head_begun, body_begun, waiting, unsent])
def test_a_connection_with_a_request_is_not_closed_for_another(keep_busy):
    first = Door(connections=LIMITS)
    second = Door(connections=LIMITS, beside=first)
    for door in (first, second):
        keep_busy(door)
    third = Door(connections=LIMITS, beside=first)
    assert [status for status, _ in third.answers()] == [503]
    assert first.transport.state == second.transport.state == "open"


def test_many_new_connections_at_once_close_as_many():
    idle = [Door(connections=LIMITS)]
    idle += [Door(connections=LIMITS, beside=idle[0]) for _ in range(6)]
    # The event loop has not told the closed ones yet.
    assert [door.transport.state for door in idle] == ["closed"] * 5 + ["open"] * 2


def test_requests_that_hold_much_are_not_read_ahead(monkeypatch):
    monkeypatch.setattr("gpubridge.frontend.http.connection._HELD_LIMIT", 150_000)
    door = Door(deferred=True)
    body = b"x" * 70_000
    door.receive(*[post(body)] * 5)
    assert len(door.handlers) == 3
    assert not door.transport.reading
    door.handlers[0].answer()
    assert door.transport.reading
    door.receive()
    for handler in door.handlers[1:]:
        handler.answer()
    door.receive()
    for handler in door.handlers[4:]:
        handler.answer()
    assert door.answers() == [(200, body)] * 5


def test_at_the_end_a_request_that_is_on_its_way_is_refused(door):
    door.receive(post(b"x" * 5000)[:100])
    door.connection.drain()
    door.connection.finish()
    assert door.answers()[0][0] == 503
    assert door.handlers[0].ends == ["aborted"]


def test_requests_that_come_together_wait_their_turn():
    """More than may be open at once come in one read: the rest is taken in order, later."""

    async def pipelined():
        door = Door(deferred=True)
        door.receive(b"".join(post(b"%d" % number) for number in range(100)) + HALF_HEAD)
        assert len(door.handlers) == 32
        assert not door.transport.reading
        for at in range(100):
            assert len(door.handlers) <= at + 32
            door.handlers[at].answer()
            await asyncio.sleep(0)
        assert door.transport.reading
        door.receive(b": x\r\n\r\n")
        door.handlers[100].answer()
        return door

    door = asyncio.run(pipelined())
    assert door.answers() == [*((200, b"%d" % number) for number in range(100)), (200, b"")]


def test_requests_that_wait_their_turn_are_dropped_with_their_connection():
    async def lost():
        door = Door(deferred=True)
        door.receive(post(b"x") * 100)
        door.handlers[0].answer()
        door.lose()
        await asyncio.sleep(0)
        return door

    door = asyncio.run(lost())
    assert len(door.handlers) == 32
    assert all(handler.ends[-1] == "aborted" for handler in door.handlers[1:])
