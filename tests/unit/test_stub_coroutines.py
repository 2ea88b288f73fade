"""The event loop of a model's coroutines: it goes on, and each coroutine has an outcome."""

import asyncio
import errno
import gc
import queue
import sys
import weakref

import pytest

from gpubridge.pb_utils import host
from gpubridge.stub.cancellations import Cancellations
from gpubridge.stub.coroutines import Coroutines

SECONDS = 20


@pytest.fixture
def logged():
    """What is logged meanwhile."""
    lines: list[str] = []
    host.attach(host.Host("", lambda level, text, file, line: lines.append(text)))
    yield lines
    host.detach()


@pytest.fixture
def coroutines(logged):
    coroutines = Coroutines()
    yield coroutines
    coroutines.close(SECONDS)


async def answer(value):
    await asyncio.sleep(0)
    return value


async def never():
    await asyncio.get_running_loop().create_future()


async def exits():
    sys.exit(3)


def test_a_coroutine_that_waits_for_what_only_it_holds_is_kept(coroutines):
    begun, done = queue.SimpleQueue(), queue.SimpleQueue()

    async def waits():
        event = asyncio.Event()
        begun.put((weakref.ref(event), asyncio.get_running_loop()))
        await event.wait()
        return "got on"

    coroutines.start(waits(), lambda *outcome: done.put(outcome))
    event, loop = begun.get(timeout=SECONDS)
    coroutines.run(answer(0))
    gc.collect()
    assert event() is not None
    loop.call_soon_threadsafe(event().set)
    assert done.get(timeout=SECONDS) == ("got on", None)


def test_a_task_that_exits_ends_neither_the_loop_nor_others(coroutines, logged):
    async def both():
        return await asyncio.gather(asyncio.ensure_future(exits()), answer(1))

    with pytest.raises(SystemExit):
        coroutines.run(both())
    assert coroutines.run(answer(2)) == 2
    assert "ended with SystemExit(3)" in logged[0]


def test_a_coroutine_that_exits_itself_says_so_alone(coroutines, logged):
    with pytest.raises(SystemExit):
        coroutines.run(exits())
    assert coroutines.run(answer(2)) == 2
    assert not logged


def test_a_loop_that_a_model_stops_goes_on(coroutines):
    async def stops():
        asyncio.get_running_loop().stop()
        return await answer(1)

    assert coroutines.run(stops()) == 1
    assert coroutines.run(answer(2)) == 2


def test_a_loop_that_a_model_closes_ends_what_waits_on_it(logged):
    coroutines = Coroutines()
    begun, done = queue.SimpleQueue(), queue.SimpleQueue()

    async def waits():
        begun.put(asyncio.get_running_loop())
        await never()

    coroutines.start(waits(), lambda *outcome: done.put(outcome))
    loop = begun.get(timeout=SECONDS)

    def close():
        loop.stop()
        # Between two runs, as another thread of a model may.
        loop.run_forever = loop.close

    loop.call_soon_threadsafe(close)
    _, error = done.get(timeout=SECONDS)
    assert "closed the event loop" in str(error)
    assert coroutines.ended
    with pytest.raises(RuntimeError, match="closed the event loop"):
        coroutines.run(answer(1))


def test_the_end_cancels_tasks_and_waits_for_their_clean_up():
    coroutines, said = Coroutines(), []
    done = queue.SimpleQueue()

    async def cleans(name):
        try:
            await never()
        finally:
            await answer(0)
            said.append(name)

    async def begins():
        tasks.append(asyncio.ensure_future(cleans("background")))

    tasks: list[asyncio.Task] = []
    coroutines.run(begins())
    coroutines.start(cleans("request"), lambda *outcome: done.put(outcome))
    coroutines.run(answer(0))
    coroutines.cancel(SECONDS)
    assert said == ["request"]
    assert isinstance(done.get(timeout=SECONDS)[1], asyncio.CancelledError)
    coroutines.close(SECONDS)
    assert said == ["request", "background"]


@pytest.mark.parametrize("how", ["exit", "stop", "cancel all"])
def test_a_task_that_ends_the_loop_at_the_end_leaves_others_their_clean_up(logged, how):
    coroutines, cleaned = Coroutines(), queue.SimpleQueue()

    async def ends():
        try:
            await never()
        finally:
            if how == "exit":
                sys.exit(3)
            elif how == "stop":
                asyncio.get_running_loop().stop()
            else:
                for task in asyncio.all_tasks() - set(tasks):
                    task.cancel()

    async def cleans():
        try:
            await never()
        finally:
            for _ in range(5):
                await answer(0)
            cleaned.put("whole")

    async def begins():
        tasks.extend(asyncio.ensure_future(each()) for each in (ends, cleans))

    tasks: list[asyncio.Task] = []
    coroutines.run(begins())
    coroutines.run(answer(0))
    coroutines.close(SECONDS)
    assert how == "cancel all" or cleaned.get_nowait() == "whole"
    assert not coroutines._thread.is_alive()
    # asyncio says in its log what nobody has taken.
    del tasks[:]
    gc.collect()


def test_a_loop_that_can_wait_no_more_ends_what_waits_on_it(logged):
    coroutines, loops = Coroutines(), []

    def select(timeout):
        raise OSError(errno.EBADF, "the model has closed the selector's descriptor")

    async def closes():
        loops.append(asyncio.get_running_loop())
        loops[0]._selector.select = select
        await never()

    with pytest.raises(RuntimeError, match="a descriptor of that loop"):
        coroutines.run(closes())
    assert coroutines.ended
    assert "the selector's descriptor" in logged[0]
    loops[0].close()


def test_a_task_that_cleans_up_already_is_not_cancelled_again():
    coroutines, said = Coroutines(), []
    begun, cleaning = queue.SimpleQueue(), queue.SimpleQueue()

    async def cleans():
        begun.put((asyncio.current_task(), asyncio.get_running_loop()))
        try:
            await never()
        finally:
            cleaning.put(None)
            await asyncio.sleep(0)
            said.append("whole")

    coroutines.start(cleans(), lambda *outcome: None)
    task, loop = begun.get(timeout=SECONDS)
    loop.call_soon_threadsafe(task.cancel)
    cleaning.get(timeout=SECONDS)
    coroutines.cancel(SECONDS)
    coroutines.close(SECONDS)
    assert said == (["whole"] if sys.version_info >= (3, 11) else said)


class Page:
    """The cells of cancellations of a control page."""

    def __init__(self):
        self.cancelled = bytearray(8)


@pytest.mark.parametrize("early", [False, True])
def test_a_coroutine_is_told_of_the_cancellation_of_its_request(coroutines, early):
    page = Page()
    cancellations = Cancellations(page)
    waiting = queue.SimpleQueue()

    async def work():
        task = asyncio.current_task()
        try:
            with cancellations.watched(3, task.cancel):
                waiting.put(None)
                await never()
        except asyncio.CancelledError:
            return "cancelled"

    done = queue.SimpleQueue()
    page.cancelled[3] = early
    coroutines.start(work(), lambda *outcome: done.put(outcome))
    waiting.get(timeout=SECONDS)
    if not early:
        # Of the ticket's request before.
        cancellations.tell(3)
        coroutines.run(answer(0))
        assert done.empty()
        page.cancelled[3] = 1
        cancellations.tell(3)
    assert done.get(timeout=SECONDS) == ("cancelled", None)


def test_a_coroutine_that_is_done_with_its_request_is_not_told(coroutines):
    page = Page()
    cancellations = Cancellations(page)

    async def work():
        with cancellations.watched(3, asyncio.current_task().cancel):
            page.cancelled[3] = 1
            cancellations.tell(3)
        await answer(0)
        return "whole"

    assert coroutines.run(work()) == "whole"
