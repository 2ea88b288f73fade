"""HTTP bodies are charged as they arrive; at the limit one that holds more than its share is refused."""

import gzip

import pytest

from gpubridge.config import HttpConnections
from tests.unit.http_endpoint import GET, Endpoint, chunked, post

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 64 * MIB
GZIP = b"Content-Encoding: gzip"


def large_endpoint(**options):
    return Endpoint(**{"body_limit": LIMIT, "arena_limit": 1 << 30, **options})


def used(endpoint):
    return endpoint.listener.budget.used


def held(endpoint):
    return endpoint.connection.account.held


async def settled(endpoint):
    """Wait until what is done by workers is done."""
    await endpoint.listener.coded.tasks.finished()


def test_a_client_that_promises_much_and_sends_little_holds_little():
    endpoint = large_endpoint()
    endpoint.receive(post(bytes(60 * MIB))[: 200 * KIB])
    assert used(endpoint) == held(endpoint) == 512 * KIB
    endpoint.lose()
    assert used(endpoint) == held(endpoint) == 0


def test_a_large_body_is_received_in_place_as_memory_is_granted():
    endpoint = large_endpoint(deferred=True)
    body = bytes(range(256)) * (10 * KIB)
    head = post(body)[: -len(body)]
    endpoint.receive(head + body[:16], body[16:])
    (handler,) = endpoint.handlers
    assert handler.body == body
    # Only what came with the head was copied.
    assert handler.copied == 16
    assert handler.asked == [0, 512 * KIB, 2 * MIB]
    assert used(endpoint) == held(endpoint) == len(body)
    handler.answer()
    assert used(endpoint) == held(endpoint) == 0
    assert endpoint.answers() == [(200, body)]


@pytest.mark.parametrize("cut", [1, 512 * KIB - 1, 512 * KIB, 512 * KIB + 1, 2 * MIB])
def test_any_split_of_a_body_is_charged_alike(cut):
    endpoint = large_endpoint()
    body = bytes(range(251)) * (13 * KIB)
    head = post(body)[: -len(body)]
    endpoint.receive(head, body[:cut], body[cut:], GET)
    assert endpoint.answers() == [(200, body), (200, b"")]


def greedy_and_others(endpoint, start):
    """Let one connection hold 40 of 64 MiB, then others come that keep to their share."""
    endpoint.receive(start)
    held_before = held(endpoint)
    others = [Endpoint(beside=endpoint, body_limit=LIMIT, deferred=True) for _ in range(3)]
    for other in others:
        other.receive(post(bytes(7 * MIB)))
    return held_before, others


@pytest.mark.parametrize("framed", [post, lambda body: chunked(body, MIB)])
def test_the_body_that_holds_more_than_its_share_makes_room(framed):
    endpoint = large_endpoint(arena_limit=64 * MIB)
    request = framed(bytes(50 * MIB))
    held_before, others = greedy_and_others(endpoint, request[: 40 * MIB])
    assert held_before > 30 * MIB
    ((status, text),) = endpoint.answers()
    assert (status, b"arena is full" in text) == (503, True)
    assert held(endpoint) == 0
    assert [other.handlers[0].ends for other in others] == [["completed"]] * 3
    assert endpoint.handlers[0].ends == ["aborted"]
    # The rest is not received any more, and its next request is served.
    endpoint.receive(request[40 * MIB :], GET)
    assert [status for status, _ in endpoint.answers()] == [503, 200]
    assert endpoint.transport.state == "open"


def test_a_body_that_finds_no_room_is_refused_and_the_rest_of_it_dropped():
    endpoint = large_endpoint(arena_limit=8 * MIB)
    endpoint.receive(post(bytes(7 * MIB)), post(b"abc"))
    assert endpoint.answers() == [(200, bytes(7 * MIB)), (200, b"abc")]
    other = Endpoint(beside=endpoint, body_limit=LIMIT)
    other.receive(post(bytes(6 * MIB))[: -1 * MIB])
    again = Endpoint(beside=endpoint, body_limit=LIMIT, deferred=True)
    # Both hold more than an eighth: the newest goes, which is its own.
    again.receive(post(bytes(6 * MIB)) + GET)
    assert [status for status, _ in again.answers()] == [503]
    again.handlers[-1].answer()
    assert [status for status, _ in again.answers()] == [503, 200]


@pytest.mark.parametrize(
    ("framed", "words"),
    [
        (post, b"of the %d bytes that all requests together have" % (10 * MIB)),
        (lambda body: chunked(body, MIB), b"of %d bytes are in use" % (10 * MIB)),
    ],
)
async def test_a_body_above_the_limit_of_all_memory_is_refused_with_both_numbers(framed, words):
    endpoint = large_endpoint(arena_limit=10 * MIB)
    endpoint.receive(framed(bytes(20 * MIB)) + GET)
    await settled(endpoint)
    (status, text), (again, _) = endpoint.answers()
    assert (status, again) == (503, 200)
    assert words in text
    assert used(endpoint) == 0


async def test_a_decompressed_body_is_charged():
    endpoint = large_endpoint(deferred=True)
    body = bytes(30 * MIB)
    endpoint.receive(post(gzip.compress(body), b"/echo", GZIP))
    await settled(endpoint)
    (handler,) = endpoint.handlers
    assert handler.body == body
    assert used(endpoint) == held(endpoint) == len(body)
    handler.answer()
    assert used(endpoint) == held(endpoint) == 0


async def test_a_bomb_is_refused_when_there_is_no_memory_for_what_it_becomes():
    endpoint = large_endpoint(arena_limit=16 * MIB)
    endpoint.receive(post(gzip.compress(bytes(60 * MIB)), b"/echo", GZIP) + post(b"abc"))
    await settled(endpoint)
    (status, text), answer = endpoint.answers()
    assert (status, b"arena is full" in text) == (503, True)
    assert answer == (200, b"abc")
    assert used(endpoint) == held(endpoint) == 0


def test_clients_that_hold_much_must_send_faster():
    endpoint = large_endpoint(connections=HttpConnections(body_timeout=20))
    request = post(bytes(60 * MIB))
    endpoint.receive(request[: 50 * MIB])
    for time in range(21):
        at = 50 * MIB + 600 * time
        endpoint.connection.check(time)
        endpoint.receive(request[at : at + 600])
    ((status, text),) = endpoint.answers()
    assert status == 408
    assert b"request body too slow: minimum 51211 bytes/s over 20 s" in text
    assert used(endpoint) == 0
