"""Calls of threads and coroutines: each waits until its outcome, whatever happens to the others."""

import asyncio
import contextvars
import gc
import os
import select
import signal
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpubridge.pb_utils import InferenceRequest
from gpubridge.pb_utils.answers import Answer
from gpubridge.pb_utils.response import ResponseIterator
from gpubridge.stub import forked
from gpubridge.stub.bls.scope import BATCH
from gpubridge.stub.forked import ForkedCalls
from gpubridge.transport.channel import Channel, ChannelClosed, DescriptorsLost, close_all
from gpubridge.transport.messages import LONGEST_CONTROL
from tests.unit.call_server import SECONDS, CallServer, query, value
from tests.waits import until


@pytest.fixture
def server():
    server = CallServer()
    yield server
    server.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def child(server):
    """Calls as a forked child makes them, by way of this process."""
    child = ForkedCalls()
    child.before_fork()
    child.after_in_parent()
    return child


def answered(caller, decoupled=False):
    """Call as `async_exec` does, with the client or as a child."""
    loop = asyncio.get_running_loop()
    source = caller.call(query(), decoupled, loop)
    return Answer(source, ResponseIterator._of if decoupled else type(source).next, loop)


async def test_a_coroutine_that_nothing_else_holds_gets_its_answer(server):
    got = []

    async def ask(ended):
        got.append(value(await query().async_exec()))
        got.extend([value(each) async for each in await query().async_exec(decoupled=True)])
        ended.set()

    ended = asyncio.Event()
    # asyncio holds tasks weakly.
    asyncio.ensure_future(ask(ended))  # noqa: RUF006
    number = await asyncio.to_thread(server.next_call)
    gc.collect()
    server.answer((number, "a", False))
    number = await asyncio.to_thread(server.next_call)
    gc.collect()
    server.answer((number, "b", True))
    await until(lambda: not server.client._calls[number]._responses)
    gc.collect()
    server.answer((number, "c", False))
    await asyncio.wait_for(ended.wait(), SECONDS)
    assert got == ["a", "b", "c"]
    assert server.cancels.empty()


def test_an_iterator_that_has_ended_cancels_nothing(server):
    stream = query().exec(decoupled=True)
    server.answer((server.next_call(), "a", False))
    assert [value(each) for each in stream] == ["a"]
    del stream
    server.caught_up()
    assert server.cancels.empty()


@pytest.mark.parametrize("begun", [True, False])
def test_a_task_that_is_cancelled_cancels_its_call_though_its_exception_is_kept(server, begun):
    async def main():
        task = query().async_exec()
        number = server.next_call()
        if begun:
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as error:
            return number, error
        return None

    number, _kept = asyncio.run(main())
    assert server.next_cancel() == (number, False)


async def test_a_call_that_is_dropped_before_it_is_sent_is_cancelled_after(server):
    first = query().async_exec()
    dropped = server.client.call(query(), True, asyncio.get_running_loop())
    del dropped
    await asyncio.sleep(0)
    numbers = server.next_call(), server.next_call()
    assert server.next_cancel() == (numbers[1], False)
    server.answer((numbers[0], "a", False))
    assert value(await first) == "a"


@pytest.mark.parametrize("of_child", [False, True])
def test_a_loop_ends_with_the_calls_that_nobody_awaits(server, child, threads, of_child):
    got = []

    async def main():
        caller = child if of_child else server.client
        answered(caller).add_done_callback(lambda answer: got.append(value(answer.result())))
        answered(caller, decoupled=True)

    running = threads.submit(asyncio.run, main())
    numbers = sorted((server.next_call(), server.next_call()))
    if of_child:
        # Two threads make them.
        for number in numbers:
            server.answer((number, "a", True), (number, None, False))
    else:
        server.answer((numbers[0], "a", False), (numbers[1], "b", True))
        # Nobody has the iterator.
        assert server.next_cancel() == (numbers[1], False)
    running.result(SECONDS)
    assert got == ["a"]
    assert not server.client._calls


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_call_goes_on_though_its_loop_is_closed(server, threads, decoupled):
    async def main():
        query().async_exec(decoupled)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    number = server.next_call()
    other = threads.submit(query().exec)
    server.answer((number, "a", decoupled), (server.next_call(), "b", False))
    assert value(other.result(SECONDS)) == "b"
    if decoupled:
        # Nobody can have its iterator.
        assert server.next_cancel() == (number, False)
    server.caught_up()
    assert server.cancels.empty()
    assert not server.client._calls


def test_a_loop_that_is_dropped_unclosed_is_collected(server):
    async def main():
        answer = query().async_exec()
        server.answer((server.next_call(), "a", False))
        return value(await answer), weakref.ref(asyncio.get_running_loop())

    got, loop = asyncio.new_event_loop().run_until_complete(main())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert (got, loop()) == ("a", None)


async def test_a_call_that_is_refused_lets_others_run(server):
    ran = []
    long = InferenceRequest(
        model_name="n" * (LONGEST_CONTROL + 1), inputs=[], requested_output_names=["OUT"]
    )
    asyncio.get_running_loop().call_soon(ran.append, True)
    assert (await long.async_exec()).has_error()
    assert ran


class Raises:
    """A waiter during whose waking a signal handler of the model raises."""

    def set(self):
        raise TimeoutError("of a signal handler")


def test_what_is_raised_while_one_answer_is_delivered_keeps_no_other_back(server):
    first, second = (server.client.call(query(), False) for _ in range(2))
    numbers = server.next_call(), server.next_call()
    first._call.add_waiter(Raises())
    server.answer((numbers[0], "a", False), (numbers[1], "b", False))
    with pytest.raises(TimeoutError):
        second.next()
    assert value(second.next()) == "b"
    assert value(first.next()) == "a"


async def test_calls_that_are_interrupted_while_they_are_sent_fail_alone(server, monkeypatch):
    outbox = server.client._outbox

    def interrupted(message, fds=()):
        monkeypatch.undo()
        raise TimeoutError("of a signal handler")

    # Else another thread may send what is gathered.
    monkeypatch.setattr(outbox, "_wake_sender", lambda: None)
    first, gathered = query().async_exec(), query().async_exec()
    monkeypatch.setattr(outbox, "send", interrupted)
    with pytest.raises(TimeoutError):
        query().exec()
    with pytest.raises(ChannelClosed, match="interrupted while it was sent, by TimeoutError"):
        await asyncio.wait_for(gathered, SECONDS)
    last = query().async_exec()
    server.answer((server.next_call(), "a", False))
    server.answer((server.next_call(), "b", False))
    assert (value(await first), value(await last)) == ("a", "b")
    assert not server.client._calls


async def test_a_call_is_sent_before_the_turn_of_its_loop_ends(server):
    tasks = [query().async_exec() for _ in range(3)]
    # The coroutine waits for the server in the middle of its turn.
    numbers = [server.next_call() for _ in tasks]
    assert numbers == sorted(numbers)
    server.answer(*((number, number, False) for number in reversed(numbers)))
    assert [value(await task) for task in tasks] == [str(number) for number in numbers]


@pytest.mark.parametrize("decoupled", [True, False])
async def test_a_call_that_is_waited_for_follows_those_that_were_made_before(server, decoupled):
    loop = asyncio.get_running_loop()
    before = [server.client.call(query(), False, loop) for _ in range(3)]
    # Not of the loop: as `exec` calls.
    last = server.client.call(query(), decoupled)
    made = [each._call.number for each in (*before, last)]
    assert [server.next_call() for _ in made] == made
    after = server.client.call(query(), False)
    assert server.next_call() == after._call.number


def test_calls_that_the_channel_is_too_full_for_wait(server, threads, monkeypatch):
    full = threading.Event()
    send = Channel.send
    monkeypatch.setattr(Channel, "send", lambda *message: send(*message) or full.set())
    server.listens.clear()
    made = threads.submit(lambda: [server.client.call(query(), False) for _ in range(2000)])
    assert full.wait(SECONDS)
    server.listens.set()
    numbers = [each._call.number for each in made.result(SECONDS)]
    assert [server.next_call() for _ in numbers] == numbers


def test_a_call_that_a_handler_of_a_signal_ends_is_cancelled_though_its_exception_is_kept(
    server, threads
):
    ended = threading.Event()

    def interrupt(number, frame):
        if not ended.is_set():
            ended.set()
            raise KeyError("interrupted")

    def send_signal():
        number = server.next_call()
        # One that comes just before the thread sleeps does not wake it.
        while not ended.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return number

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        sent = threads.submit(send_signal)
        with pytest.raises(KeyError, match="interrupted") as kept:
            query().exec()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert server.next_cancel() == (sent.result(SECONDS), False)
    assert kept.value.__traceback__
    # Others go on.
    answering = threads.submit(lambda: server.answer((server.next_call(), "a", False)))
    assert value(query().exec()) == "a"
    answering.result(SECONDS)


def test_calls_of_one_turn_are_sent_together(server):
    async def main():
        tasks = [query().async_exec() for _ in range(40)]
        await asyncio.sleep(0)
        numbers = [server.next_call() for _ in tasks]
        server.answer(*((number, number, False) for number in numbers))
        await asyncio.gather(*tasks)

    before = sys.getswitchinterval()
    # No other thread takes the interpreter from a turn.
    sys.setswitchinterval(30)
    try:
        asyncio.run(main())
    finally:
        sys.setswitchinterval(before)
    assert sum(server.messages) == 40
    # A collection of garbage may let the sending thread in.
    assert len(server.messages) < 8


def test_many_loops_call_at_once_and_none_stands_still(server, threads):
    ended = threading.Event()

    def answer():
        for _ in range(6 * 60):
            server.answer((server.next_call(), "a", False))
        ended.set()

    async def many():
        for _ in range(60):
            await query().async_exec()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        done = [threads.submit(answer), *(threads.submit(asyncio.run, many()) for _ in range(6))]
        for each in done:
            each.result(SECONDS)
    finally:
        sys.setswitchinterval(before)
    assert ended.is_set()


def test_a_server_that_is_gone_ends_what_waits(server, threads):
    async def wait():
        await query().async_exec()

    waiting = [threads.submit(asyncio.run, wait()), threads.submit(query().exec)]
    stream = query().exec(decoupled=True)
    for _ in range(3):
        server.next_call()
    server.hang_up()
    for each in waiting:
        with pytest.raises(ChannelClosed, match="the server is gone"):
            each.result(SECONDS)
    with pytest.raises(ChannelClosed, match="the server is gone"):
        next(stream)


async def test_calls_that_are_gathered_after_the_server_is_gone_end(server):
    stream = query().exec(decoupled=True)
    server.next_call()
    server.hang_up()
    with pytest.raises(ChannelClosed):
        # Nobody reads after this.
        next(stream)
    # The first call of a turn is sent at once, the second is gathered.
    with pytest.raises(ChannelClosed):
        query().async_exec()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(query().async_exec(), SECONDS)
    assert not server.client._calls


def test_threads_share_an_iterator(server, threads):
    stream = query().exec(decoupled=True)
    number = server.next_call()
    taking = [threads.submit(list, stream) for _ in range(4)]
    for letter in "abcdefgh":
        server.answer((number, letter, True))
    server.answer((number, None, False))
    got = [value(each) for taken in taking for each in taken.result(SECONDS)]
    # A thread that comes when all is over begins anew.
    assert set(got) == {*"abcdefgh", None}


def test_responses_that_nobody_reads_do_not_stop_the_called_model(server, threads):
    stream = query().exec(decoupled=True)
    number = server.next_call()
    other = threads.submit(query().exec)
    waiting = server.next_call()
    for i in range(200):
        server.answer((number, i, True))
    # The thread of the other call reads.
    assert [server.credits.get(timeout=SECONDS) for _ in range(10)] == [(number, 16)] * 10
    server.answer((number, None, False), (waiting, "a", False))
    assert value(other.result(SECONDS)) == "a"
    assert [value(each) for each in stream] == [*map(str, range(200)), None]


def test_a_call_says_for_which_batch_it_is_made(server, threads):
    def batches(*makers):
        done = [threads.submit(make) for make in makers]
        told = [server.calls.get(timeout=SECONDS) for _ in done]
        server.answer(*((number, "a", False) for number, _ in told))
        for each in done:
            each.result(SECONDS)
        return sorted(batch for _, batch in told)

    async def of_task():
        await asyncio.create_task(asyncio.wait_for(query().async_exec(), SECONDS))

    async def of_its_thread():
        await asyncio.to_thread(query().exec)

    def under(batch, run):
        BATCH.set(batch)
        return run()

    within = contextvars.copy_context
    assert batches(
        lambda: within().run(under, 5, query().exec),
        lambda: within().run(under, 6, lambda: asyncio.run(of_task())),
        lambda: within().run(under, 7, lambda: asyncio.run(of_its_thread())),
        query().exec,
    ) == [0, 5, 6, 7]


def in_child(run):
    """Run something in a forked child; returns whether it returned True."""
    with warnings.catch_warnings():
        # Of Python 3.12, where other threads run.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        passed = False
        try:
            passed = run() is True
        finally:
            os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refusal_of(kept):
    """Ask the stream that a list holds for a response; cancel and drop it; return why it refused."""
    try:
        next(kept[0])
    except ChannelClosed as error:
        text = str(error)
    kept[0].cancel()
    kept.clear()
    gc.collect()
    return text


def test_a_child_leaves_the_calls_of_its_parent_alone(server):
    kept = [query().exec(decoupled=True)]
    number = server.next_call()
    server.answer((number, "a", True))
    assert value(next(kept[0])) == "a"

    def child():
        server.client.disown()
        return "got a child that the model forked" in refusal_of(kept)

    assert in_child(child)
    server.answer((number, "b", False))
    assert value(next(kept[0])) == "b"
    server.caught_up()
    assert server.cancels.empty()


async def test_a_child_calls_on_after_a_call_that_it_gave_up(server, child):
    given_up = answered(child)
    await asyncio.sleep(0)
    first = await asyncio.to_thread(server.next_call)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    # Its channel is closed, and the next one may have its number.
    assert server.next_cancel() == (first, False)
    again = answered(child)
    server.answer((server.next_call(), "b", False))
    assert value(await asyncio.wait_for(again, SECONDS)) == "b"


def test_a_child_of_a_child_leaves_its_calls_alone(server, child):
    kept = [ResponseIterator._of(child.call(query(), True))]
    number = server.next_call()
    server.answer((number, "a", True))
    assert value(next(kept[0])) == "a"
    server.answer((number, "b", True))
    kept[0]._source.wait()

    assert in_child(lambda: "got a child that it forked" in refusal_of(kept))
    server.answer((number, "c", False))
    assert [value(each) for each in kept[0]] == ["b", "c"]
    server.caught_up()
    assert server.cancels.empty()


def test_a_child_cancels_a_call_that_a_child_of_its_own_has_inherited(server, child):
    call = child.call(query(), True)
    number = server.next_call()
    waits, ends = os.pipe()

    def drop():
        os.close(ends)
        call.abandon()
        told = server.next_cancel()
        os.close(waits)
        return told

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.close(waits)
            # Writable until the other process has heard of the cancellation.
            poll = select.poll()
            poll.register(ends, 0)
            poll.poll(SECONDS * 1000)
        finally:
            os._exit(0)
    try:
        assert drop() == (number, False)
    finally:
        os.waitpid(pid, 0)
        # The thread that made the call reads until then.
        server.answer((number, None, False))


@pytest.mark.parametrize("lacking", ["thread", "descriptor"])
def test_calls_of_children_go_on_after_one_for_which_there_was_none(
    server, child, monkeypatch, lacking
):
    def fail(*_):
        monkeypatch.undo()
        if lacking == "thread":
            raise RuntimeError("can't start new thread")
        raise DescriptorsLost("the limit is reached")

    if lacking == "thread":
        full = type("Full", (threading.Thread,), {"start": fail})
        monkeypatch.setattr(forked.threading, "Thread", full)
    else:
        whole = Channel.whole
        monkeypatch.setattr(
            Channel, "whole", lambda *got: fail(close_all(got[2])) if got[2] else whole(*got)
        )

    def ask():
        call = child.call(query(), False)
        assert call._channel.wait(SECONDS)
        return call.next()

    with pytest.raises(ChannelClosed):
        ask()
    again = child.call(query(), False)
    server.answer((server.next_call(), "a", False))
    assert value(again.next()) == "a"
