"""Events between processes: order, leases, and what happens where there are none."""

from __future__ import annotations

import pytest

from tests.simcuda.machine import running_machine
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

PRODUCER = """
segment = mine(4096)
put(segment.pointer, bytes(4096))
copies, host = CopyStream(context), pinned(4096)
host[:] = bytes([8]) * 4096
with context.pushed():
    theirs = ok(d.cuStreamCreate(1))
    hold(theirs)
ring = EventRing(context, 2)
answer = [list(segment.handle), [list(handle) for handle in ring.handles]]
"""
CONSUMER = """
segment = DeviceSegment.open(context, 1, bytes(told[0]), 4096)
events = ImportedEvents(context, [bytes(handle) for handle in told[1]])
copies, back = CopyStream(context), pinned(4096)
"""


@pytest.fixture
def machine():
    with running_machine() as machine:
        yield machine
        assert machine.violations() == []


@pytest.fixture
def pair(machine):
    with device_worker(machine) as producer, device_worker(machine) as consumer:
        consumer.do(CONSUMER, producer.do(PRODUCER))
        yield producer, consumer


@pytest.mark.parametrize("ordered", [True, False])
def test_a_consumer_waits_on_the_device_for_the_producer(pair, ordered):
    producer, consumer = pair
    index = producer.do(
        "copies.order_after(int(theirs)); copies.h2d(segment.pointer, host, 4096)\n"
        "answer = ring.record(copies.handle)"
    )
    if ordered:
        consumer.do("events.order(told, copies.handle)", index)
    consumer.do("copies.d2h(back, segment.pointer, 4096)")
    if ordered:
        assert consumer.do("answer = [copies.done(), events.done(told)]", index) == [False, False]
        producer.do("released.set()")
    consumer.do("copies.wait()")
    assert consumer.do("answer = back[0]") == (8 if ordered else 0)
    if ordered:
        assert consumer.do("answer = events.done(told)", index) is True


def test_a_leased_event_is_not_recorded_again(machine, pair):
    producer, _ = pair
    record = "answer = ring.record(copies.handle)"
    assert [producer.do(record) for _ in range(3)] == [0, 1, None]
    assert len(machine.calls("cuEventRecord")) == 2
    assert producer.do("ring.release(1); answer = [ring.leased(), ring.record(copies.handle)]") == [
        1,
        1,
    ]
    # The one that was released longest ago comes next.
    assert producer.do("ring.release(1); ring.release(0); answer = ring.record(0)") == 1


@pytest.mark.parametrize("index", [0, -1, 2])
def test_what_is_not_leased_cannot_be_released(pair, index):
    producer, consumer = pair
    with pytest.raises(RuntimeError, match=f"event {index} of 2 is not leased"):
        producer.do(f"ring.release({index})")
    if index:
        with pytest.raises(RuntimeError, match=f"expected an event of 2, got {index}"):
            consumer.do(f"events.order({index}, 0)")


def test_an_event_that_cannot_be_recorded_is_not_leased(machine, pair):
    producer, _ = pair
    machine.fail("cuEventRecord", 400)
    with pytest.raises(RuntimeError, match="INVALID_HANDLE"):
        producer.do("ring.record(copies.handle)")
    machine.heal()
    assert producer.do("answer = [ring.leased(), ring.record(0), ring.record(0)]") == [0, 1, 0]


def test_nothing_is_made_in_steady_state(machine, pair):
    producer, consumer = pair
    before = len(machine.calls())
    for _ in range(3):
        index = producer.do("answer = ring.record(copies.handle)")
        consumer.do("events.order(told, copies.handle); copies.wait()", index)
        producer.do("ring.release(told)", index)
    names = {call.name for call in machine.calls()[before:]}
    assert names - {"cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"} == {
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuStreamSynchronize",
    }


@pytest.mark.parametrize("call", ["cuIpcGetEventHandle", "cuEventCreate"])
def test_where_events_do_not_cross_nothing_is_left(machine, call):
    machine.fail(call, 801, nth=2)
    with device_worker(machine) as producer:
        with pytest.raises(RuntimeError, match=f"{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
            producer.do("EventRing(context, 2)")
        made = [made for made in machine.calls("cuEventCreate") if made.result == 0]
        assert len(made) == len(machine.calls("cuEventDestroy"))


def test_what_cannot_be_opened_leaves_nothing(machine):
    with device_worker(machine) as producer, device_worker(machine) as consumer:
        memory, handles = producer.do(PRODUCER)
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            consumer.do(CONSUMER, [memory, [handles[0], [0] * 64]])
        with pytest.raises(RuntimeError, match="expected a CUDA IPC handle of 64 bytes"):
            consumer.do(CONSUMER, [memory, [handles[0], [0]]])
        assert len(machine.calls("cuEventDestroy", consumer.pid)) == 2
        with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
            producer.do("ImportedEvents(context, ring.handles)")


def test_closed_events_are_closed_once(machine, pair):
    producer, consumer = pair
    producer.do("ring.close(); ring.close()")
    consumer.do("events.close(); events.close()")
    assert len(machine.calls("cuEventDestroy", producer.pid)) == 2
    assert len(machine.calls("cuEventDestroy", consumer.pid)) == 2
    with pytest.raises(RuntimeError, match="are closed"):
        producer.do("ring.record(0)")
    with pytest.raises(RuntimeError, match="expected an event of 0"):
        consumer.do("events.done(0)")


def test_who_waits_for_a_producer_that_was_killed_is_released_by_another_process(machine):
    with (
        device_worker(machine) as owner,
        device_worker(machine) as producer,
        device_worker(machine) as consumer,
    ):
        memory, _ = owner.do(PRODUCER)
        _, events = producer.do(PRODUCER)
        consumer.do(CONSUMER, [memory, events])
        index = producer.do("copies.order_after(int(theirs)); answer = ring.record(copies.handle)")
        consumer.do("events.order(told, copies.handle)", index)
        producer.kill()
        assert consumer.do("answer = [events.done(told), copies.done()]", index) == [False, False]
        owner.do("events = ImportedEvents(context, [bytes(handle) for handle in told])", events)
        owner.do("events.complete(copies.handle); copies.wait()")
        consumer.do("copies.wait()")
        assert consumer.do("answer = events.done(told)", index) is True
