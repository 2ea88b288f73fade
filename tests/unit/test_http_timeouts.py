"""HttpConnection.check: who is late is told so, or cut off; who is not is left alone."""

import asyncio

import pytest

from gpubridge.config import HttpConnections
from tests.unit.http_endpoint import GET, Endpoint, post

LIMITS = HttpConnections(
    max_connections=2, header_timeout=10, body_timeout=20, idle_timeout=100, send_timeout=30
)
HALF_HEAD = b"GET /echo HTTP/1.1\r\nHost"


@pytest.fixture
def endpoint():
    return Endpoint(connections=LIMITS)


def check(endpoint, *times):
    for time in times:
        if endpoint.transport.state != "closed":
            endpoint.connection.check(time)


def test_a_slow_head_is_refused(endpoint):
    endpoint.receive(HALF_HEAD)
    check(endpoint, 1, 10.9)
    endpoint.receive(b": x\r\nX-More")
    check(endpoint, 10.95)
    assert endpoint.answers() == []
    check(endpoint, 11)
    ((status, body),) = endpoint.answers()
    assert (status, b"whole head of a request within 10 s" in body) == (408, True)
    # It is dropped what comes; a client that does not close is cut off.
    assert endpoint.transport.state == "half"
    endpoint.receive(b": y\r\n\r\n")
    check(endpoint, 12, 21)
    assert endpoint.transport.state == "half"
    check(endpoint, 22)
    assert endpoint.transport.state == "closed"


def test_heads_that_follow_each_other_are_not_one_slow_head(endpoint):
    for time in range(0, 50, 2):
        endpoint.receive(HALF_HEAD)
        check(endpoint, time)
        endpoint.receive(b": x\r\n\r\n")
    assert [status for status, _ in endpoint.answers()] == [200] * 25


def test_a_slow_body_is_refused_and_its_memory_given_up(endpoint):
    endpoint.receive(post(b"x" * 50_000)[:100])
    for time in range(20):
        check(endpoint, time)
        endpoint.receive(b"y")
    assert endpoint.answers() == []
    check(endpoint, 20)
    ((status, body),) = endpoint.answers()
    assert (status, b"minimum 500 bytes/s" in body) == (408, True)
    assert endpoint.handlers[0].ends == ["aborted"]


def test_a_body_that_comes_fast_enough_is_not(endpoint):
    request = post(b"x" * 50_000)
    endpoint.receive(request[:100])
    for time, start in enumerate(range(100, len(request), 600)):
        check(endpoint, time)
        endpoint.receive(request[start : start + 600])
    assert time > 60
    assert endpoint.answers() == [(200, b"x" * 50_000)]


def test_a_slow_body_in_chunks_is_refused(endpoint):
    endpoint.receive(b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for time in range(21):
        check(endpoint, time)
        endpoint.receive(b"1\r\nx\r\n")
    assert endpoint.answers()[0][0] == 408


def test_an_idle_connection_is_closed(endpoint):
    check(endpoint, 0, 99)
    endpoint.receive(GET)
    check(endpoint, 100, 199)
    assert endpoint.transport.state == "open"
    check(endpoint, 200)
    assert endpoint.transport.state == "closed"
    assert len(endpoint.answers()) == 1


def test_a_request_that_is_executed_is_never_late():
    endpoint = Endpoint(deferred=True, connections=LIMITS)
    endpoint.receive(post(b"body"))
    check(endpoint, *range(0, 100_000, 1000))
    assert endpoint.transport.state == "open"
    endpoint.handlers[0].answer()
    assert endpoint.answers() == [(200, b"body")]


def test_nothing_is_late_while_we_do_not_read():
    endpoint = Endpoint(deferred=True, connections=LIMITS)
    slow = post(b"x" * 50_000)
    endpoint.receive(post(b"body"), slow[:60])
    endpoint.connection.pause_writing()
    assert not endpoint.transport.reading
    check(endpoint, *range(0, 1000, 10))
    endpoint.connection.resume_writing()
    check(endpoint, 1000, 1019)
    endpoint.receive(slow[60:])
    for handler in endpoint.handlers:
        handler.answer()
    assert [status for status, _ in endpoint.answers()] == [200] * 2


def test_a_client_that_does_not_take_its_answers_is_cut_off(endpoint):
    endpoint.receive(GET)
    endpoint.transport.unsent = 100_000
    check(endpoint, 0, 29)
    # Slowly is not enough, ...
    endpoint.transport.unsent -= 10_000
    check(endpoint, 29.5)
    assert endpoint.transport.state == "open"
    check(endpoint, 30)
    assert endpoint.transport.state == "closed"


def test_a_client_that_takes_its_answers_fast_enough_is_not(endpoint):
    endpoint.receive(GET)
    for time in range(0, 200, 10):
        endpoint.transport.unsent = 500_000 - 510 * time
        check(endpoint, time)
    assert endpoint.transport.state == "open"


@pytest.mark.parametrize(("rate", "state"), [(600, "closed"), (61_000, "open")])
def test_a_client_that_leaves_much_unread_has_to_take_it_faster(endpoint, rate, state):
    endpoint.receive(GET)
    for time in range(0, 200, 10):
        endpoint.transport.unsent = (60 << 20) - rate * time
        check(endpoint, time)
    assert endpoint.transport.state == state


def test_zero_is_no_limit():
    endpoint = Endpoint(
        connections=HttpConnections(
            max_connections=0, header_timeout=0, body_timeout=0, idle_timeout=0, send_timeout=0
        )
    )
    check(endpoint, 0, 1e6)
    endpoint.receive(HALF_HEAD)
    check(endpoint, 2e6, 3e6)
    endpoint.transport.unsent = 100
    check(endpoint, 4e6, 5e6)
    assert endpoint.transport.state == "open"


def busy_endpoint(beside=None):
    """A connection with a request that is being executed."""
    endpoint = Endpoint(deferred=True, connections=LIMITS, beside=beside)
    endpoint.receive(GET)
    return endpoint


def test_too_many_connections():
    first = busy_endpoint()
    others = [busy_endpoint(first)]
    others += [Endpoint(connections=LIMITS, beside=first) for _ in range(66)]
    assert others[0].answers() == []
    for told in others[1:65]:
        ((status, body),) = told.answers()
        assert (status, b"2 connections" in body) == (503, True)
    assert others[66].transport.sent == b""
    assert others[66].transport.state == "closed"
    # The first goes, and a place is free again.
    for endpoint in others[1:]:
        endpoint.lose()
    first.lose()
    last = Endpoint(connections=LIMITS, beside=first)
    last.receive(GET)
    assert last.answers() == [(200, b"")]


def test_the_longest_idle_connection_makes_room():
    first = Endpoint(connections=LIMITS)
    second = Endpoint(connections=LIMITS, beside=first)
    # Now the second one is idle for longer.
    first.receive(GET)
    third = Endpoint(connections=LIMITS, beside=first)
    assert [endpoint.transport.state for endpoint in (first, second, third)] == [
        "open",
        "closed",
        "open",
    ]
    second.lose()
    third.receive(GET)
    fourth = Endpoint(connections=LIMITS, beside=first)
    assert [endpoint.transport.state for endpoint in (first, third, fourth)] == [
        "closed",
        "open",
        "open",
    ]
    first.lose()
    for endpoint in (third, fourth):
        endpoint.receive(GET)
        assert endpoint.answers()[-1] == (200, b"")
    assert first.connections == {third.connection, fourth.connection}


def head_begun(endpoint):
    endpoint.receive(GET, HALF_HEAD)


def body_begun(endpoint):
    endpoint.receive(post(b"abc")[:-1])


def waiting(endpoint):
    endpoint.deferred = True
    endpoint.receive(GET)


def unsent(endpoint):
    endpoint.receive(GET)
    endpoint.transport.unsent = 1


@pytest.mark.parametrize("keep_busy", [head_begun, body_begun, waiting, unsent])
def test_a_connection_with_a_request_is_not_closed_for_another(keep_busy):
    first = Endpoint(connections=LIMITS)
    second = Endpoint(connections=LIMITS, beside=first)
    for endpoint in (first, second):
        keep_busy(endpoint)
    third = Endpoint(connections=LIMITS, beside=first)
    assert [status for status, _ in third.answers()] == [503]
    assert first.transport.state == second.transport.state == "open"


def test_many_new_connections_at_once_close_as_many():
    idle = [Endpoint(connections=LIMITS)]
    idle += [Endpoint(connections=LIMITS, beside=idle[0]) for _ in range(6)]
    # The event loop has not told the closed ones yet.
    assert [endpoint.transport.state for endpoint in idle] == ["closed"] * 5 + ["open"] * 2


def test_at_the_end_a_request_that_is_on_its_way_is_refused(endpoint):
    endpoint.receive(post(b"x" * 5000)[:100])
    endpoint.connection.drain()
    endpoint.connection.finish()
    assert endpoint.answers()[0][0] == 503
    assert endpoint.handlers[0].ends == ["aborted"]


async def test_requests_behind_unread_answers_are_dropped_with_their_connection():
    endpoint = Endpoint(deferred=True)
    endpoint.connection.pause_writing()
    endpoint.receive(post(b"x") * 100)
    assert endpoint.handlers == []
    endpoint.lose()
    await asyncio.sleep(0)
    assert endpoint.handlers == []
