"""Asynchronous generators of one-file models: a client that leaves ends its own stream alone."""

from __future__ import annotations

import asyncio
import queue
import sys
from types import SimpleNamespace

import pytest

from gpubridge.one_file import adapter
from gpubridge.pb_utils import InferenceRequest, host
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

    def __init__(self, cancellations, page, ticket):
        self.on_cancel = lambda react: cancellations.watched(ticket, react)
        self.cancelled = lambda: page.cancelled[ticket] != 0
        self.response_sender = lambda: SimpleNamespace(send=lambda *arguments: None)


class Streams(adapter._AsyncStream):
    declared = SimpleNamespace(context="request")

    def __init__(self, *generators):
        left = list(generators)
        self.call = lambda request: left.pop(0)()

    def arguments(self, request):
        return {"request": request}

    def response(self, returned):
        return returned


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

    requests = []
    for ticket in range(2):
        request = object.__new__(InferenceRequest)
        request._handle = Handle(cancellations, page, ticket)
        requests.append(request)
    model = Streams(takes, waits)
    coroutines.start(model.execute(requests), lambda *outcome: done.put(outcome))
    begun.get(timeout=SECONDS)
    page.cancelled[0] = 1
    cancellations.tell(0)
    assert begun.get(timeout=SECONDS) == 0
    # It is cancelled where its own client stays.
    coroutines.cancel(SECONDS)
    assert isinstance(done.get(timeout=SECONDS)[1], asyncio.CancelledError)
