"""HTTP bodies are charged as they arrive; at the limit one that holds more than its share is refused."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from gpubridge.config import HttpConnections
from tests.unit.http_door import GET, Door, chunked, post

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 64 * MIB
GZIP = b"Content-Encoding: gzip"


def large_door(**options):
    return Door(**{"body_limit": LIMIT, "arena_limit": 1 << 30, **options})


def used(door):
    return door.listener.budget.used


def held(door):
    return door.connection._account.held


async def settled(door):
    """Wait until what is done by workers is done."""
    await door.listener.coded._tasks.finished()


def test_who_promises_much_and_sends_little_holds_little():
    door = large_door()
    door.receive(post(bytes(60 * MIB))[: 200 * KIB])
    assert used(door) == held(door) == 512 * KIB
    door.lose()
    assert used(door) == held(door) == 0


def test_a_large_body_is_received_in_place_as_memory_is_granted():
    door = large_door(deferred=True)
    body = bytes(range(256)) * (10 * KIB)
    head = post(body)[: -len(body)]
    door.receive(head + body[:16], body[16:])
    (handler,) = door.handlers
    assert handler.body == body
    # Only what came with the head was copied.
    assert handler.copied == 16
    assert handler.asked == [0, 512 * KIB, 2 * MIB]
    assert used(door) == held(door) == len(body)
    handler.answer()
    assert used(door) == held(door) == 0
    assert door.answers() == [(200, body)]


@pytest.mark.parametrize("cut", [1, 512 * KIB - 1, 512 * KIB, 512 * KIB + 1, 2 * MIB])
def test_where_a_body_is_cut_does_not_matter(cut):
    door = large_door()
    body = bytes(range(251)) * (13 * KIB)
    head = post(body)[: -len(body)]
    door.receive(head, body[:cut], body[cut:], GET)
    assert door.answers() == [(200, body), (200, b"")]


def greedy_and_others(door, start):
    """Let one connection hold 40 of 64 MiB, then others come that keep to their share."""
    door.receive(start)
    held_before = held(door)
    others = [Door(beside=door, body_limit=LIMIT, deferred=True) for _ in range(3)]
    for other in others:
        other.receive(post(bytes(7 * MIB)))
    return held_before, others


def assert_refused(door, others, held_before):
    assert held_before > 30 * MIB
    ((status, text),) = door.answers()
    assert (status, b"arena is full" in text) == (503, True)
    assert held(door) == 0
    assert [other.handlers[0].ends for other in others] == [["completed"]] * 3


def test_the_body_that_holds_more_than_its_share_makes_room():
    door = large_door(arena_limit=64 * MIB)
    request = post(bytes(50 * MIB))
    held_before, others = greedy_and_others(door, request[: 40 * MIB])
    assert_refused(door, others, held_before)
    assert door.handlers[0].ends == ["aborted"]
    # The rest is not received any more, and its next request is served.
    door.receive(request[40 * MIB :], GET)
    assert [status for status, _ in door.answers()] == [503, 200]
    assert door.transport.state == "open"


def test_so_does_one_in_chunks():
    door = large_door(arena_limit=64 * MIB)
    request = chunked(bytes(50 * MIB), MIB)
    held_before, others = greedy_and_others(door, request[: 40 * MIB])
    assert_refused(door, others, held_before)
    door.receive(request[40 * MIB :], GET)
    assert [status for status, _ in door.answers()] == [503, 200]


def test_a_body_that_finds_no_room_is_refused_and_the_rest_of_it_dropped():
    door = large_door(arena_limit=8 * MIB)
    door.receive(post(bytes(7 * MIB)), post(b"abc"))
    assert door.answers() == [(200, bytes(7 * MIB)), (200, b"abc")]
    other = Door(beside=door, body_limit=LIMIT)
    other.receive(post(bytes(6 * MIB))[: -1 * MIB])
    again = Door(beside=door, body_limit=LIMIT, deferred=True)
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
def test_a_body_above_the_limit_of_all_memory_is_refused_with_both_numbers(framed, words):
    async def converse():
        door = large_door(arena_limit=10 * MIB)
        door.receive(framed(bytes(20 * MIB)) + GET)
        await settled(door)
        (status, text), (again, _) = door.answers()
        assert (status, again) == (503, 200)
        assert words in text
        assert used(door) == 0

    asyncio.run(converse())


def test_what_a_coded_body_becomes_is_charged():
    async def converse():
        door = large_door(deferred=True)
        body = bytes(30 * MIB)
        door.receive(post(gzip.compress(body), b"/echo", GZIP))
        await settled(door)
        (handler,) = door.handlers
        assert handler.body == body
        assert used(door) == held(door) == len(body)
        handler.answer()
        assert used(door) == held(door) == 0

    asyncio.run(converse())


def test_a_bomb_is_refused_when_there_is_no_memory_for_what_it_becomes():
    async def converse():
        door = large_door(arena_limit=16 * MIB)
        door.receive(post(gzip.compress(bytes(60 * MIB)), b"/echo", GZIP) + post(b"abc"))
        await settled(door)
        (status, text), answer = door.answers()
        assert (status, b"arena is full" in text) == (503, True)
        assert answer == (200, b"abc")
        assert used(door) == held(door) == 0

    asyncio.run(converse())


def test_who_holds_much_has_to_send_faster():
    door = large_door(connections=HttpConnections(body_timeout=20))
    request = post(bytes(60 * MIB))
    door.receive(request[: 50 * MIB])
    for time in range(21):
        at = 50 * MIB + 600 * time
        door.connection.check(time)
        door.receive(request[at : at + 600])
    ((status, text),) = door.answers()
    assert status == 408
    assert b"expected 51211 bytes a second of the request's body within 20 s" in text
    assert used(door) == 0
