"""In which calls an execute is blocked: what a stub tells the server that looks for deadlocks."""

import asyncio
import threading
from contextvars import copy_context

import pytest

from gpubridge.stub.bls.scope import BATCH
from gpubridge.stub.coroutines import Coroutines
from gpubridge.transport.calls import BLOCKS
from tests.unit.call_server import SECONDS, CallServer, query, value

pytestmark = pytest.mark.both_runtimes


@pytest.fixture
def server():
    server = CallServer()
    coroutines = Coroutines(server.client.read_on)
    server.client.waits.awaited = lambda: coroutines.awaited
    server.run = coroutines.run
    number = BATCH.set(3)
    yield server
    BATCH.reset(number)
    coroutines.close(SECONDS)
    server.close()


class Beside:
    """A thread that gets the next call's number, its batch, and whether it blocks its execute; then answers."""

    def __init__(self, server, until=lambda blocking: True):
        self._server, self._until = server, until
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self):
        number, self.batch = self._server.calls.get(timeout=SECONDS)
        while True:
            self.blocking = self._server.are_blocking(number) == [number]
            if self._until(self.blocking):
                break
        self._server.answer((number, 1, False))

    def told(self):
        self._thread.join(SECONDS)
        return self.batch, self.blocking


def test_a_call_whose_answer_is_waited_for_at_once_says_so(server):
    beside = Beside(server)
    assert value(query().exec()) == "1"
    assert beside.told()[0] == 3 | BLOCKS


def test_a_call_of_another_thread_does_not_block(server):
    beside = Beside(server)
    thread = threading.Thread(target=copy_context().run, args=(lambda: query().exec(),))
    thread.start()
    thread.join(SECONDS)
    assert beside.told() == (3, False)


def test_an_iterator_blocks_where_it_is_waited_for(server):
    beside = Beside(server, until=bool)
    responses = query().exec(decoupled=True)
    assert [value(each) for each in responses] == ["1"]
    assert beside.told() == (3, True)


def test_an_iterator_that_waits_does_not_block(server):
    responses = query().exec(decoupled=True)
    beside = Beside(server)
    while beside._thread.is_alive():
        server.client.catch_up()
    assert beside.told() == (3, False)
    assert value(next(responses)) == "1"


async def awaited():
    await query().async_exec()


async def by_a_task():
    await asyncio.create_task(awaited())


async def iterated():
    async for _ in await query().async_exec(decoupled=True):
        pass


async def limited():
    await asyncio.wait_for(query().async_exec(), 1000)


async def of_a_task_beside():
    task = asyncio.create_task(awaited())
    ended = asyncio.Event()
    task.add_done_callback(lambda _: ended.set())
    await ended.wait()


@pytest.mark.parametrize("runs", ["stub", "own"])
@pytest.mark.parametrize(
    ("coroutine", "blocks"),
    [
        (awaited, True),
        (by_a_task, True),
        (iterated, True),
        (limited, False),
        (of_a_task_beside, False),
    ],
)
def test_a_coroutine_blocks_by_what_it_awaits(server, runs, coroutine, blocks):
    beside = Beside(server, until=blocks.__eq__)
    (server.run if runs == "stub" else asyncio.run)(coroutine())
    assert beside.told() == (3, blocks)


def test_all_of_several_calls_block(server):
    async def several():
        return await asyncio.gather(*[query().async_exec() for _ in range(2)])

    def answer():
        first, second = server.next_call(), server.next_call()
        while server.are_blocking(first, second) != [first, second]:
            pass
        server.answer((first, 1, False))
        while server.are_blocking(first, second) != [second]:
            pass
        server.answer((second, 2, False))

    thread = threading.Thread(target=answer)
    thread.start()
    assert [value(each) for each in server.run(several())] == ["1", "2"]
    thread.join(SECONDS)
