"""Events between stubs as the server knows them: what crosses, and what is lost with whom."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.engine.devices import staging
from gpubridge.engine.devices.edge_events import (
    EdgeEvent,
    LeasePoller,
    StubEvents,
    add_event_waits,
    awaited_by,
)
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.engine.devices.staging import DeviceStaging
from gpubridge.errors import BridgeError, ErrorCode, StubDied
from gpubridge.host_shm import Segment
from gpubridge.request import InferRequest, InferResponse, MemoryRange, PendingMemory
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import CallContext, RequestContext, ResponseContext, context_codec
from gpubridge.transport.control import AWAITED, ControlPage
from gpubridge.transport.device_events import event_of, waits_of, with_waits
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature
from tests.waits import timers

COUNT = 4


@pytest.mark.parametrize("kind", [CallContext, ResponseContext])
def test_an_event_is_named_with_its_lease(kind):
    assert event_of(kind(event=3, event_lease=77), COUNT) == (3, 77)
    assert event_of(kind(event=0, event_lease=0), COUNT) == (0, 0)


@pytest.mark.parametrize(("event", "lease"), [(4, 0), ((1 << 64) - 1, 0), (0, None)])
def test_a_wrong_event_is_malformed(event, lease):
    with pytest.raises(MalformedMessage):
        event_of(ResponseContext(event=event, event_lease=lease), COUNT)


@pytest.mark.parametrize(
    "waits", [[(5, 1), (5, 1), None, (6, 1)], [None, (5, 0)], [(5, 0)] * 48, [(5, 2), (5, 3)]]
)
def test_events_of_tensors_arrive_unchanged(waits):
    raw = with_waits(RequestContext(shared=True), waits).encoded()
    arrived = context_codec(RequestContext).decode(raw)
    assert arrived.shared
    assert waits_of(arrived) == waits


def test_edges_without_waits_add_no_record():
    context = RequestContext(shared=True)
    assert with_waits(context, [None, None]) is context
    assert waits_of(context) is None
    assert event_of(ResponseContext(), COUNT) is None


class Stub:
    """A stub's events, and what the server does when it dies."""

    def __init__(self, name, sharing=None):
        self.arena = SimpleNamespace(
            region=1,
            events=SimpleNamespace(count=COUNT, loss=f"{name} is dead", end=f"{name} has ended"),
            uuid="GPU-0",
        )
        self.page = ControlPage(Segment.create(0, ControlPage.SIZE))
        self.pending = self.page.events.pending
        self.released = []
        self.killed = []
        self.lent = []
        devices = SimpleNamespace(
            release_waiters=lambda arena, *what: self.released.append(what),
            events=sharing or EventSharing("wait"),
        )
        borrowed = SimpleNamespace(views=lambda refs: [object() for _ in refs])
        self.events = StubEvents(
            "GPU-0",
            borrowed,
            self.page,
            devices,
            lambda: False,
            lambda: self.lent,
            self.killed.append,
        )
        self.events.begin(self.arena)

    def answer(self, number=None, inputs=(), pending=True):
        """Answer a request with an event, or with what is complete; returns the outcome."""
        request = InferRequest(b"", None, 0, (), lambda outcome: None)
        request.ranges = list(inputs)
        context = ResponseContext()
        if number is not None:
            self.pending[number] = pending
            context = ResponseContext(event=number, event_lease=0)
        record = Record(0, Signature((), ()), (), context, 0, "", ())
        return self.events.answered(InferResponse(record.signature, (), []), record, request)


def handed_on(response):
    return MemoryRange(object(), 0, 8, PendingMemory(object(), response.event))


def test_tensors_made_of_lost_ones_are_lost_over_any_number_of_models():
    first, second, third = Stub("first"), Stub("second"), Stub("third")
    made = first.answer(2)
    of_that = second.answer(0, [handed_on(made)])
    last = handed_on(of_that)
    first.events.close()
    assert first.released == [([2], "first is dead")]
    outcome = third.answer(None, [last])
    assert isinstance(outcome, StubDied)
    assert (outcome.message, outcome.code) == ("first is dead", ErrorCode.UNAVAILABLE)
    # Others of the same stubs are as they were.
    assert isinstance(third.answer(None, [handed_on(second.answer(1))]), InferResponse)


def test_complete_tensors_are_not_lost():
    first, second = Stub("first"), Stub("second")
    made = first.answer(1, pending=False)
    other = first.answer(2)
    first.events.close()
    assert isinstance(second.answer(None, [handed_on(made)]), InferResponse)
    assert isinstance(second.answer(None, [handed_on(other)]), StubDied)


@pytest.mark.parametrize("ends", [lambda events: events.close(), lambda events: events.end(1)])
def test_nothing_waits_for_complete_tensors_of_a_stub_that_has_ended(ends):
    stub, announced = Stub("stub"), []
    announcer = SimpleNamespace(known=(), announce=announced.append)
    parts = [handed_on(stub.answer(number, pending=False)) for number in (3, 1)]
    context = RequestContext()
    assert waits_of(add_event_waits(context, parts, announcer)) == [(1, 3), (1, 1)]
    ends(stub.events)
    # Who waits already is released, whatever the driver does with waits for the dead.
    assert stub.released == [([1, 3], "stub has ended")]
    assert add_event_waits(context, parts, announcer) is context


@pytest.mark.parametrize("seen", ["by the stub", "at its end", "by the driver", "by nobody"])
async def test_the_server_waits_for_a_tensor_as_long_as_it_may(monkeypatch, seen):
    stub = Stub("stub")
    asked = []

    def done(number):
        asked.append(number)
        if seen == "by the stub":
            stub.pending[number] = 0
        if seen == "at its end":
            stub.events.close()
        return seen == "by the driver"

    async def run(work):
        return work()

    stub.arena.events.done, stub.arena.events.instance = done, "stub_0"
    if seen == "by nobody":
        monkeypatch.setattr(staging, "LONGEST_EVENT_SECONDS", 0.0)
    made = stub.answer(2).event
    waiting = DeviceStaging(
        SimpleNamespace(run=run), None, SimpleNamespace(device_work=None)
    )._wait_for_event(made)
    if seen in ("by the stub", "by the driver"):
        await waiting
    else:
        with pytest.raises(BridgeError, match=r"stub is dead|GPU work of stub 'stub_0'.*event 2 "):
            await waiting
    assert asked == [2]


async def test_any_response_may_come_of_an_answer_to_a_call():
    first, caller = Stub("first"), Stub("caller")
    answer = handed_on(first.answer(0))
    caller.events.keep([answer])
    response = caller.answer(3)
    first.events.close()
    assert response.event.lost == "first is dead"
    assert isinstance(caller.answer(), StubDied)
    caller.events.close()


async def test_a_batch_executed_when_lost_memory_went_back_has_no_answer():
    first, caller = Stub("first"), Stub("caller")
    request, waiting = (InferRequest(b"", None, 0, (), lambda outcome: None) for _ in range(2))
    at_stub = [(3, 0, request), (4, 1, waiting)]
    answer = handed_on(first.answer(0))
    caller.events.keep([answer])
    first.events.close()
    # Its streams were let go of, and its look at that ends before it is heard of.
    caller.events.release([answer], lambda: at_stub, 3)
    del answer
    record = Record(0, Signature((), ()), (), ResponseContext(), 0, "", ())
    response = InferResponse(record.signature, (), [])
    assert isinstance(caller.events.answered(response, record, request), StubDied)
    assert caller.events.answered(response, record, waiting) is response
    caller.events.close()


def test_a_call_comes_of_whatever_its_caller_was_lent():
    first, caller = Stub("first"), Stub("caller")
    lent = handed_on(first.answer(0))
    record = Record(0, Signature((), ()), (), CallContext(event=1, event_lease=0), 0, "", ())
    (part,) = caller.events.called([MemoryRange(None, 0, 0, None)], record, [[lent]])
    assert list(awaited_by([part])) == []
    first.events.close()
    assert caller.answer(None, [lent]).message == "first is dead"


def test_a_stub_that_has_handed_on_nothing_leaves_nothing_to_do():
    stub = Stub("stub")
    stub.events.close()
    assert stub.released == []


def shown(stub, *names, looked=100):
    for at, name in enumerate((looked, *names)):
        stub.page.events.awaited[at] = name


def test_a_stub_says_what_its_streams_wait_for():
    first, second = Stub("first"), Stub("second")
    lost = frozenset({handed_on(first.answer(2)).keep.event.name})
    assert second.events.waits_for(lost, 50) is False
    shown(second, *lost)
    assert second.events.waits_for(lost, 50) is True
    shown(second, 12345)
    assert second.events.waits_for(lost, 50) is False


@pytest.mark.parametrize("full", [True, False])
def test_a_stub_that_cannot_say_is_asked_for_what_it_was_lent(full):
    first, second = Stub("first"), Stub("second")
    part = handed_on(first.answer(2))
    lost = frozenset({part.keep.event.name})
    # It has not looked since, or its buffer is full.
    shown(second, *(range(1, AWAITED + 1) if full else ()), looked=100 if full else 10)
    assert second.events.waits_for(lost, 50) is False
    second.lent.append([part])
    assert second.events.waits_for(lost, 50) is None


def test_a_stub_says_what_it_has_not_seen_to_be_done():
    stub = Stub("stub")
    stub.answer(1, pending=False)
    assert stub.events.unfinished() == frozenset()
    made = stub.answer(2)
    assert stub.events.unfinished() == {made.event.name}


def test_an_event_outlives_nobody():
    event = EdgeEvent(None, 0, object(), memoryview(b""))
    event.precede(EdgeEvent(None, 1, object(), memoryview(b"")))
    event.lose("gone")
    assert event.lost == "gone"


@pytest.mark.parametrize("looks", [1, 3])
async def test_late_leases_are_looked_at_until_they_are_over(looks):
    over = asyncio.Event()
    seen = []

    def look():
        seen.append(None)
        if len(seen) == looks:
            over.set()
        return len(seen) < looks

    late = LeasePoller(look)
    late.begin()
    late.begin()
    await over.wait()
    assert (len(seen), timers()) == (looks, [])
    late.begin()
    late.close()
    assert (len(seen), timers()) == (looks, [])
