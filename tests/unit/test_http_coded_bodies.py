"""Bodies with a coding: heavy ones are worked on beside the event loop, which serves others meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib

import pytest

from gpubridge.frontend import coding
from gpubridge.frontend.http import coded_bodies
from tests.unit.http_door import GET, Door, chunked, parse_answers, post

LIMIT = 8 << 20
BODY = bytes(range(256)) * 8192
GZIP = b"Content-Encoding: gzip"
ACCEPT = b"Accept-Encoding: gzip"


class Gate:
    """Holds workers up until it is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self.open = threading.Event()

    def before(self, function):
        def held(*arguments):
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.open.wait(60)
            return function(*arguments)

        return held


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(coding.Inflater, "read", gate.before(coding.Inflater.read))
    monkeypatch.setattr(coded_bodies, "compress", gate.before(coding.compress))
    yield gate
    gate.open.set()


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, 60)


async def finished(door):
    """Wait until everything heavy is done."""
    await door.listener.coded._tasks.finished()


def large_door(**options):
    return Door(body_limit=LIMIT, **options)


REQUESTS = {
    "unpacked": post(gzip.compress(BODY), b"/echo", GZIP),
    "packed": post(BODY, b"/echo", ACCEPT),
    "both": chunked(gzip.compress(BODY), 900, b"/echo", GZIP, ACCEPT),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_others_are_served_meanwhile_and_answers_keep_their_order(gate, kind):
    async def converse():
        door = large_door()
        neighbour = large_door(beside=door)
        door.receive(REQUESTS[kind] + GET)
        await reached(gate)
        assert door.answers() == []
        neighbour.receive(post(b"x") + post(gzip.compress(b"y"), b"/echo", GZIP, ACCEPT))
        assert neighbour.answers() == [(200, b"x"), (200, b"y")]
        gate.open.set()
        await finished(door)
        assert door.answers() == [(200, BODY), (200, b"")]
        assert door.transport.state == "open"

    asyncio.run(converse())


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_connection_that_is_lost_meanwhile_ends_its_request_once(gate, kind):
    async def converse():
        door = large_door()
        door.receive(REQUESTS[kind])
        await reached(gate)
        door.lose()
        gate.open.set()
        await finished(door)
        (handler,) = door.handlers
        assert handler.ends == (["completed"] if kind == "packed" else ["aborted"])
        assert handler.memory is None or kind == "packed"
        assert not door.transport.sent

    asyncio.run(converse())


def test_a_client_that_ends_its_side_meanwhile_gets_its_answer(gate):
    async def converse():
        door = large_door()
        door.receive(REQUESTS["unpacked"])
        await reached(gate)
        door.end()
        gate.open.set()
        await finished(door)
        assert door.answers() == [(200, BODY)]
        assert door.transport.state == "closed"

    asyncio.run(converse())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (gzip.compress(bytes(LIMIT + 1)), b"longer than the limit of 8388608"),
        (gzip.compress(BODY)[:-9], b"ends in the middle"),
        (gzip.compress(BODY)[:-8] + bytes(8), b"is not gzip data"),
    ],
)
def test_a_fault_that_shows_late_is_the_answer(body, words):
    async def converse():
        door = large_door()
        door.receive(post(body, b"/echo", GZIP) + GET)
        await finished(door)
        (first, told), second = door.answers()
        assert (first, second) == (400, (200, b""))
        assert words in told
        assert door.handlers[0].ends == ["aborted"]
        assert door.handlers[0].memory is None

    asyncio.run(converse())


def test_a_handler_without_memory_for_what_a_body_becomes():
    async def converse():
        door = large_door()
        door.receive(post(zlib.compress(BODY), b"/full", b"Content-Encoding: deflate"))
        await finished(door)
        assert [status for status, _ in door.answers()] == [503]
        assert door.handlers[0].ends == ["refused", "aborted"]

    asyncio.run(converse())


def test_what_bodies_become_counts_against_their_connection(monkeypatch, gate):
    monkeypatch.setattr("gpubridge.frontend.http.connection._HELD_LIMIT", 4 << 20)

    async def converse():
        door = large_door(deferred=True)
        gate.open.set()
        door.receive(*[REQUESTS["unpacked"]] * 2)
        await finished(door)
        assert not door.transport.reading
        for handler in door.handlers:
            handler.answer()
        assert door.transport.reading
        assert door.answers() == [(200, BODY)] * 2

    asyncio.run(converse())


def test_a_fault_of_ours_is_an_answer_too(monkeypatch, caplog):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(coded_bodies, "compress", fail)

    async def converse():
        door = large_door()
        door.receive(REQUESTS["packed"])
        await finished(door)
        ((status, _, _),) = parse_answers(bytes(door.transport.sent))
        assert status == 500

    asyncio.run(converse())
    assert "ZeroDivisionError" in caplog.text
