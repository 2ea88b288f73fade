"""Bodies with a coding: heavy ones are worked on beside the event loop, which serves others meanwhile."""

import asyncio
import gzip
import random
import threading
import zlib

import pytest

from gpubridge.frontend import coding
from gpubridge.frontend.http import coded_bodies
from tests.unit.http_endpoint import GET, Endpoint, chunked, parse_answers, post

LIMIT = 8 << 20
BODY = bytes(range(256)) * 8192
GZIP = b"Content-Encoding: gzip"
ACCEPT = b"Accept-Encoding: gzip"


class HeldWorkers:
    """Worker threads that wait in a function until they are released."""

    def __init__(self):
        self.reached = threading.Event()
        self.released = threading.Event()

    def before(self, function):
        def held(*arguments):
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.released.wait(60)
            return function(*arguments)

        return held


@pytest.fixture
def held_workers(monkeypatch):
    held_workers = HeldWorkers()
    monkeypatch.setattr(coding.Inflater, "read", held_workers.before(coding.Inflater.read))
    monkeypatch.setattr(coded_bodies, "compress", held_workers.before(coding.compress))
    yield held_workers
    held_workers.released.set()


async def reached(held_workers):
    assert await asyncio.to_thread(held_workers.reached.wait, 60)


async def finished(endpoint):
    """Wait until everything heavy is done."""
    await endpoint.listener.coded.tasks.finished()


def large_endpoint(**options):
    return Endpoint(body_limit=LIMIT, **options)


REQUESTS = {
    "unpacked": post(gzip.compress(BODY), b"/echo", GZIP),
    "packed": post(BODY, b"/echo", ACCEPT),
    "both": chunked(gzip.compress(BODY), 900, b"/echo", GZIP, ACCEPT),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_others_are_served_meanwhile_and_answers_keep_their_order(held_workers, kind):
    endpoint = large_endpoint()
    neighbour = large_endpoint(beside=endpoint)
    endpoint.receive(REQUESTS[kind] + GET)
    await reached(held_workers)
    assert endpoint.answers() == []
    neighbour.receive(post(b"x") + post(gzip.compress(b"y"), b"/echo", GZIP, ACCEPT))
    assert neighbour.answers() == [(200, b"x"), (200, b"y")]
    held_workers.released.set()
    await finished(endpoint)
    assert endpoint.answers() == [(200, BODY), (200, b"")]
    assert endpoint.transport.state == "open"


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_connection_that_is_lost_meanwhile_ends_its_request_once(held_workers, kind):
    endpoint = large_endpoint()
    endpoint.receive(REQUESTS[kind])
    await reached(held_workers)
    endpoint.lose()
    held_workers.released.set()
    await finished(endpoint)
    (handler,) = endpoint.handlers
    assert handler.ends == (["completed"] if kind == "packed" else ["aborted"])
    assert handler.memory is None or kind == "packed"
    assert not endpoint.transport.sent


async def test_a_client_that_ends_its_side_meanwhile_gets_its_answer(held_workers):
    endpoint = large_endpoint()
    endpoint.receive(REQUESTS["unpacked"])
    await reached(held_workers)
    endpoint.end()
    held_workers.released.set()
    await finished(endpoint)
    assert endpoint.answers() == [(200, BODY)]
    assert endpoint.transport.state == "closed"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (gzip.compress(bytes(LIMIT + 1)), b"longer than the limit of 8388608"),
        (gzip.compress(BODY)[:-9], b"ends in the middle"),
        (gzip.compress(BODY)[:-8] + bytes(8), b"is not gzip data"),
    ],
)
async def test_a_fault_that_shows_late_is_the_answer(body, words):
    endpoint = large_endpoint()
    endpoint.receive(post(body, b"/echo", GZIP) + GET)
    await finished(endpoint)
    (first, told), second = endpoint.answers()
    assert (first, second) == (400, (200, b""))
    assert words in told
    assert endpoint.handlers[0].ends == ["aborted"]
    assert endpoint.handlers[0].memory is None


async def test_a_handler_without_memory_for_what_a_body_becomes():
    endpoint = large_endpoint()
    endpoint.receive(post(zlib.compress(BODY), b"/full", b"Content-Encoding: deflate"))
    await finished(endpoint)
    assert [status for status, _ in endpoint.answers()] == [503]
    assert endpoint.handlers[0].ends == ["refused", "aborted"]


async def test_a_fault_of_ours_is_an_answer_too(monkeypatch, caplog):
    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(coded_bodies, "compress", fail)
    endpoint = large_endpoint()
    endpoint.receive(REQUESTS["packed"])
    await finished(endpoint)
    ((status, _, _),) = parse_answers(bytes(endpoint.transport.sent))
    assert status == 500
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("used", "status"), [(56 << 20, 503), (0, 200)])
async def test_a_long_compressed_answer_is_charged(used, status):
    endpoint = large_endpoint(arena_limit=64 << 20)
    body = random.randbytes(3 << 20)
    endpoint.receive(post(body, b"/echo", ACCEPT))
    endpoint.listener.budget.take(used, large=True)
    await finished(endpoint)
    ((got, answer),) = endpoint.answers()
    assert got == status
    assert answer == body or b"there is no memory for an answer of" in answer
