"""Asynchronous generators of one-file models: a client that leaves ends its own stream alone."""

import asyncio
import queue
import sys
import threading
from types import SimpleNamespace

import pytest

from gpubridge.one_file import adapter
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, host
from gpubridge.pb_utils.response import InferenceResponseSender
from gpubridge.stub.cancellations import Cancellations
from gpubridge.stub.coroutines import Coroutines

SECONDS = 20


@pytest.fixture
def coroutines():
    host.attach(host.Host("", lambda level, text, file, line: None))
    coroutines = Coroutines()
    yield coroutines
    coroutines.close(SECONDS)
    host.detach()


class Page:
    """The cells of cancellations of a control page."""

    def __init__(self):
        self.cancelled = bytearray(8)


class Handle:
    """A request of a stub that is cancelled by its cell."""

    def __init__(self, cancellations, page, ticket, sender=None):
        self.on_cancel = lambda react: cancellations.watched(ticket, react)
        self.cancelled = lambda: page.cancelled[ticket] != 0
        self.response_sender = lambda: sender or SimpleNamespace(send=lambda *arguments: None)


class Stream:
    """A stream whose responses wait for its client until that is ``ready``."""

    decoupled = True

    def __init__(self, ready):
        self.ready = ready
        self.sent = []

    def waits(self, *_):
        while not self.ready.is_set():
            yield 0.001

    def send(self, response, final):
        self.sent.append((response, final))

    def sender_dropped(self, _):
        """Leave it: the test has failed by then."""


class Streams(adapter._AsyncStream):
    declared = SimpleNamespace(context="request")

    def __init__(self, *generators):
        left = list(generators)
        self.call = lambda request: left.pop(0)()

    def arguments(self, request):
        return {"request": request}

    def response(self, returned):
        return returned


def request_of(handle):
    request = object.__new__(InferenceRequest)
    request._handle = handle
    return request


def test_a_generator_whose_client_reads_slowly_waits_alone(coroutines):
    page, ended = Page(), queue.SimpleQueue()
    cancellations, ready = Cancellations(page), [threading.Event(), threading.Event()]

    async def answers():
        yield one
        yield other

    one, other = InferenceResponse([]), InferenceResponse([])
    streams = [Stream(each) for each in ready]
    for ticket, stream in enumerate(streams):
        sender = InferenceResponseSender._on(stream)
        request = request_of(Handle(cancellations, page, ticket, sender))
        coroutines.start(
            Streams(answers).execute([request]), lambda *_, ticket=ticket: ended.put(ticket)
        )
    try:
        ready[1].set()
        assert ended.get(timeout=SECONDS) == 1
        assert streams[0].sent == []
    finally:
        ready[0].set()
    assert ended.get(timeout=SECONDS) == 0
    assert streams[0].sent == streams[1].sent == [(one, False), (other, False), (None, True)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks count no cancellations")
def test_a_generator_that_takes_its_cancellation_leaves_the_next_request_none(coroutines):
    page, begun, done = Page(), queue.SimpleQueue(), queue.SimpleQueue()
    cancellations = Cancellations(page)

    async def takes():
        try:
            begun.put(None)
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            pass
        yield 1

    async def waits():
        begun.put(asyncio.current_task().cancelling())
        await asyncio.get_running_loop().create_future()
        yield 2

    requests = [request_of(Handle(cancellations, page, ticket)) for ticket in range(2)]
    model = Streams(takes, waits)
    coroutines.start(model.execute(requests), lambda *outcome: done.put(outcome))
    begun.get(timeout=SECONDS)
    page.cancelled[0] = 1
    cancellations.tell(0)
    assert begun.get(timeout=SECONDS) == 0
    # It is cancelled where its own client stays.
    coroutines.cancel(SECONDS)
    assert isinstance(done.get(timeout=SECONDS)[1], asyncio.CancelledError)
