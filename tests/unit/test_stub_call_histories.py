"""Random histories of calls: whatever happens to others, each gets what its model answers, in order.

Calls are made by threads, tasks and streams on several event loops, and by forked children; answers
come one by one or several in a message. Waits for them time out, tasks are cancelled, streams are dropped, loops are
closed, children are killed, and garbage is collected. A model of the history knows which responses each call must get, and which are cancelled.
"""

import asyncio
import gc
import json
import os
import signal
import threading
import time
import warnings
from concurrent.futures import Future

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.pb_utils import InferenceResponse, host
from gpubridge.stub.forked import ForkedCalls
from tests.unit.call_server import SECONDS, CallServer, query, value

_LOOPS = 2
_OVER = object()
# A child that was forked while another thread was in AddressSanitizer's allocator waits there for ever: GCC 12's
# has no handlers of forks.
_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
_FORKED = () if _SANITIZED else ("child", "child task", "child stream")
_STEPS = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                *("thread", "task", "late task", "watched", "fired", "expired"),
                *("stream", "tasks on a stream", "idle stream"),
                *_FORKED,
            ]
        ),
        st.integers(0, _LOOPS - 1),
    ),
    st.tuples(st.just("respond"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("end"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["give up", "cancel"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["close loop"]), st.integers(0, _LOOPS - 1)),
    st.tuples(st.sampled_from(["collect"] if _SANITIZED else ["collect", "fork"]), st.none()),
)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def start(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        """Close the loop, with what still waits on it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        for task in asyncio.all_tasks(self.loop):
            # It says so in its log.
            task._log_destroy_pending = False
        self.loop.close()


class Made:
    """A call, and what it must get: the model of a history."""

    def __init__(self, kind, number, loop):
        self.kind = kind
        self.number = number
        self.loop = loop
        self.sent: list[str | None] = []
        # Whether the server has not ended it, and whether somebody still wants its responses.
        self.open = self.wanted = True
        self.future: Future | None = None
        self.stream = None
        # The process of a child, and where it writes what it got.
        self.child: tuple[int, int] | None = None

    @property
    def is_stream(self):
        return "stream" in self.kind

    @property
    def on_loop(self):
        return self.kind in _ON_LOOP or self.kind == "tasks on a stream"


class History:
    """Takes the steps of a history, and checks its end."""

    def __init__(self, children):
        self.server = CallServer()
        self.children = children
        self.loops = [Loop() for _ in range(_LOOPS)]
        self.made: list[Made] = []
        self.count = 0
        # Streams of closed loops, which are let go of at some time.
        self.lost: set[int] = set()
        self.told: list[tuple[int, bool]] = []

    def take(self, step, what):
        match step:
            case "respond" | "end":
                self.answer(what, step == "end")
            case "give up" | "cancel":
                calls = [each for each in self.made if each.open and each.wanted]
                if calls:
                    getattr(self, step.replace(" ", "_"))(calls[what % len(calls)])
            case "close loop":
                self.close_loop(what)
            case "collect":
                gc.collect()
            case "fork":
                made = Made("fork", 0, self.loops[0])
                made.child = self.forked(self.drop_all)
                assert _result(made) is None
            case _:
                self.call(step, self.loops[what])

    def call(self, kind, loop):
        if kind == "thread":
            future: Future = Future()
            threading.Thread(target=lambda: future.set_result(query().exec())).start()
            made = Made(kind, self.server.next_call(), loop)
            made.future = future
        elif kind in _ON_LOOP:
            future = loop.start(_ON_LOOP[kind]())
            made = Made(kind, self.server.next_call(), loop)
            made.future = future
            if kind == "expired":
                assert future.result(SECONDS)
                self.is_cancelled(made)
            elif kind == "fired":
                made.future = future.result(SECONDS)
        elif kind in _OF_CHILD:
            child = self.forked(_OF_CHILD[kind])
            made = Made(kind, self.server.next_call(), loop)
            made.child = child
        else:
            stream = query().exec(decoupled=True)
            made = Made(kind, self.server.next_call(), loop)
            if kind == "idle stream":
                made.stream = stream
            else:
                begun: Future = Future()
                made.future = loop.start(_shared(stream, begun))
                # A loop that is closed before would never run it.
                begun.result(SECONDS)
        self.made.append(made)

    def answer(self, indices, ends):
        calls = [each for each in self.made if each.open]
        chosen = {id(calls[i % len(calls)]): calls[i % len(calls)] for i in indices if calls}
        answers = []
        for made in chosen.values():
            open_ = made.is_stream and not ends
            self.count += 1
            text = None if made.is_stream and ends else str(self.count)
            made.sent.append(text)
            made.open = open_
            answers.append((made.number, text, open_))
        if answers:
            self.server.answer(*answers)

    def give_up(self, made):
        """Drop what the model holds of a call: it is cancelled, and no other."""
        if made.kind in ("thread", "fired"):
            return
        if made.child is not None:
            os.kill(made.child[0], signal.SIGKILL)
            _wait_for(made)
        elif made.stream is not None:
            made.stream = None
        elif not made.future.cancel():
            return
        elif made.kind == "watched":
            made.wanted = False
            made.loop.start(asyncio.sleep(0)).result(SECONDS)
            return
        # Who keeps the exception of the task keeps its iterator.
        made.future = None
        self.is_cancelled(made)

    def is_cancelled(self, made):
        """Wait until a call is cancelled that nobody wants any more."""
        deadline = time.monotonic() + SECONDS
        while not self.cancelled():
            assert time.monotonic() < deadline, made.kind
            self.loops[0].start(asyncio.sleep(0)).result(SECONDS)
            gc.collect()
        made.wanted = False
        assert self.told.pop() == (made.number, False)

    def cancelled(self):
        """Return what was cancelled since the last look, but for streams of closed loops."""
        while not self.server.cancels.empty():
            told = self.server.next_cancel()
            if told[0] not in self.lost:
                self.told.append(told)
        return self.told

    def cancel(self, made):
        """Ask the called model to stop: what it still sends is received."""
        if made.stream is not None:
            made.stream.cancel()
            self.server.caught_up()
            assert self.cancelled().pop() == (made.number, True)

    def close_loop(self, index):
        """Close a loop with all that waits there, which is answered in vain, and make another one."""
        closed, self.loops[index] = self.loops[index], Loop()
        for made in self.made:
            if made.on_loop and made.loop is closed and made.wanted:
                made.wanted = False
                if made.is_stream:
                    self.lost.add(made.number)
        closed.close()

    def forked(self, run):
        """Run something in a child; returns its process, and where it writes the result."""
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            # Of Python 3.12: other threads run.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                self.server.client.disown()
                self.children.after_in_child()
                host.attach(host.current()._replace(caller=self.children))
                os.write(writes, json.dumps(run()).encode())
            finally:
                os._exit(0)
        os.close(writes)
        return pid, reads

    def drop_all(self):
        for made in self.made:
            made.stream = None
        gc.collect()

    def check(self):
        """End what is open: each call that nobody gave up gets what was sent to it."""
        self.answer(list(range(len(self.made))), True)
        for made in self.made:
            if made.wanted:
                assert _result(made) == made.sent, made.kind
        # Nobody else was cancelled.
        self.server.caught_up()
        assert not self.cancelled()
        assert self.server.calls.empty()

    def close(self):
        for made in self.made:
            if made.child is not None:
                os.kill(made.child[0], signal.SIGKILL)
                _wait_for(made)
        for loop in self.loops:
            loop.close()
        self.server.close()


def _result(made):
    if made.stream is not None:
        return [value(each) for each in made.stream]
    if made.child is not None:
        got = os.read(made.child[1], 1 << 16)
        _wait_for(made)
        return json.loads(got)
    result = made.future.result(SECONDS)
    return [value(result)] if isinstance(result, InferenceResponse) else result


def _wait_for(made):
    """Wait for the end of a child."""
    pid, reads = made.child
    made.child = None
    os.close(reads)
    os.waitpid(pid, 0)


async def _answer():
    return await query().async_exec()


async def _late():
    """Wait for a time, and then on."""
    answer = query().async_exec()
    try:
        await asyncio.wait([answer], timeout=0)
    except asyncio.CancelledError:
        # Of this wait alone: the call goes on.
        answer.cancel()
        raise
    return await answer


async def _watched():
    """Wait in a way that is cancelled alone: the call goes on."""
    (answer,), _ = await asyncio.wait([query().async_exec()])
    return answer.result()


async def _fired():
    """Call, and return what gets the answer: nobody awaits it."""
    got: Future = Future()
    query().async_exec().add_done_callback(lambda answer: got.set_result(answer.result()))
    return got


async def _expired():
    try:
        await asyncio.wait_for(query().async_exec(), 0)
    except asyncio.TimeoutError:
        return True


async def _responses():
    return [value(each) async for each in await query().async_exec(decoupled=True)]


async def _shared(stream, begun):
    """Take the responses of a stream in two tasks; returns them in their order."""
    begun.set_result(None)
    got = []

    async def take():
        # Not `async for`, which begins again where the stream is over.
        while (each := await anext(stream, _OVER)) is not _OVER:
            got.append(value(each))

    await asyncio.gather(take(), take())
    return got


_ON_LOOP = {
    "task": _answer,
    "late task": _late,
    "watched": _watched,
    "fired": _fired,
    "expired": _expired,
    "stream": _responses,
}
_OF_CHILD = {
    "child": lambda: [value(query().exec())],
    "child task": lambda: [value(asyncio.run(_late()))],
    "child stream": lambda: asyncio.run(_responses()),
}


@pytest.fixture(scope="module")
def children():
    """Calls of forked children, by way of this process."""
    calls = ForkedCalls()
    calls.before_fork()
    calls.after_in_parent()
    return calls


@given(steps=st.lists(_STEPS, max_size=14))
def test_each_call_gets_what_is_sent_to_it(children, steps):
    history = History(children)
    try:
        for step in steps:
            history.take(*step)
        history.check()
    finally:
        history.close()
