"""Events between processes: order, leases, and what happens where there are none."""

import pytest

from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

# The server's part: it has the memory and the events.
OWNER = """
segment = mine(8192)
put(segment.pointer, bytes(8192))
events = SharedEvents.create(context, 2)
copies = CopyStream(context)
answer = [list(segment.handle), [list(handle) for handle in events.handles]]
"""
OPENED = """
segment = DeviceSegment.open(context, 1, bytes(told[0]), 8192)
events = SharedEvents.open(context, [bytes(handle) for handle in told[1]])
copies = CopyStream(context)
"""
PRODUCER = (
    OPENED
    + """
host = pinned(4096)
host[:] = bytes([8]) * 4096
with context.pushed():
    theirs, other = int(ok(d.cuStreamCreate(1))), int(ok(d.cuStreamCreate(1)))
    hold(theirs)
ring = EventRing(events)
leases = []

def record(stream):
    lease = ring.record(stream)
    leases.append(lease)
    return None if lease is None else lease.number

def produce():
    # What a held stream will write, and an event of it.
    with context.pushed():
        ok(d.cuMemcpyHtoDAsync(segment.pointer, host, 4096, theirs))
    return record(theirs)
"""
)
CONSUMER = OPENED + "back = pinned(4096)\n"
READ = "copies.d2h(back, segment.pointer, 4096); "


@pytest.fixture
def trio(machine):
    with (
        device_worker(machine) as owner,
        device_worker(machine) as producer,
        device_worker(machine) as consumer,
    ):
        shared = owner.do(OWNER)
        producer.do(PRODUCER, shared)
        consumer.do(CONSUMER, shared)
        yield owner, producer, consumer


@pytest.mark.parametrize("ordered", [True, False])
def test_a_consumer_waits_on_the_device_for_the_producer(trio, ordered):
    _, producer, consumer = trio
    number = producer.do("answer = produce()")
    if ordered:
        consumer.do("events.order(told, copies.handle)", number)
    consumer.do(READ)
    if ordered:
        assert consumer.do("answer = [copies.done(), events.done(told)]", number) == [False, False]
        producer.do("released.set()")
    consumer.do("copies.wait()")
    assert consumer.do("answer = back[0]") == (8 if ordered else 0)
    if ordered:
        assert consumer.do("answer = events.done(told)", number) is True


def test_a_host_waits_for_the_producer(trio):
    _, producer, consumer = trio
    number = producer.do("answer = produce(); threading.Timer(0.2, released.set).start()")
    consumer.do("events.wait(told, 'another');" + READ + "copies.wait()", number)
    assert consumer.do("answer = back[0]") == 8


@pytest.mark.parametrize("kept", [True, False])
def test_an_event_that_is_recorded_again_too_early_lets_its_consumer_go(trio, kept):
    _, producer, consumer = trio
    number = producer.do("answer = produce()")
    if not kept:
        producer.do("leases.clear(); record(other); released.wait(0.01)")
        # The other one of the ring, and then this one.
        number = producer.do("answer = record(other)")
    else:
        producer.do("record(other)")
    consumer.do("events.order(told, copies.handle);" + READ, number)
    if kept:
        assert consumer.do("answer = copies.done()") is False
        producer.do("released.set()")
    consumer.do("copies.wait()")
    assert consumer.do("answer = back[0]") == (8 if kept else 0)


def test_a_leased_event_is_not_recorded_again(machine, trio):
    _, producer, _ = trio
    record = "answer = record(copies.handle)"
    assert [producer.do(record) for _ in range(3)] == [0, 1, None]
    assert len(machine.calls("cuEventRecord")) == 2
    assert producer.do("leases[1] = None; answer = [ring.free(), record(copies.handle)]") == [1, 1]
    # The one that came back longest ago comes next.
    assert producer.do("leases[3] = None; leases[0] = None; answer = record(0)") == 1


@pytest.mark.parametrize("number", [-1, 2])
def test_missing_events_cannot_be_waited_for(trio, number):
    _, _, consumer = trio
    with pytest.raises(RuntimeError, match=f"expected an event of 2, got {number}"):
        consumer.do(f"events.order({number}, 0)")


def test_an_event_that_cannot_be_recorded_is_not_leased(machine, trio):
    _, producer, _ = trio
    machine.fail("cuEventRecord", 400)
    with pytest.raises(RuntimeError, match="INVALID_HANDLE"):
        producer.do("record(copies.handle)")
    machine.heal()
    assert producer.do("answer = [ring.free(), record(0), record(0)]") == [2, 1, 0]


def test_nothing_is_made_in_steady_state(machine, trio):
    _, producer, consumer = trio
    consumer.do("copies.wait()")
    before = len(machine.calls())
    for _ in range(3):
        number = producer.do("answer = record(copies.handle)")
        consumer.do("events.order(told, copies.handle); copies.wait()", number)
        producer.do("leases.clear()")
    names = {call.name for call in machine.calls()[before:]}
    assert names - {"cuEventQuery", "cuEventSynchronize"} == {
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuEventRecord",
        "cuStreamWaitEvent",
    }


@pytest.mark.parametrize("call", ["cuIpcGetEventHandle", "cuEventCreate"])
def test_events_that_cannot_be_shared_leave_nothing(machine, call):
    machine.fail(call, 801, nth=2)
    with device_worker(machine) as owner:
        with pytest.raises(RuntimeError, match=f"{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
            owner.do("SharedEvents.create(context, 2)")
        made = [made for made in machine.calls("cuEventCreate") if made.result == 0]
        assert len(made) == len(machine.calls("cuEventDestroy"))


def test_events_that_cannot_be_opened_leave_nothing(machine):
    with device_worker(machine) as owner, device_worker(machine) as consumer:
        memory, handles = owner.do(OWNER)
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            consumer.do(CONSUMER, [memory, [handles[0], [0] * 64]])
        with pytest.raises(RuntimeError, match="expected a CUDA IPC handle of 64 bytes"):
            consumer.do(CONSUMER, [memory, [handles[0], [0]]])
        assert len(machine.calls("cuEventDestroy", consumer.pid)) == 2
        with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
            owner.do("SharedEvents.open(context, events.handles)")


def test_closed_events_are_closed_once(machine, trio):
    for worker in trio:
        worker.do("events.close(); events.close()")
        assert len(machine.calls("cuEventDestroy", worker.pid)) == 2
        with pytest.raises(RuntimeError, match="expected an event of 0"):
            worker.do("events.done(0)")


def test_the_owner_releases_waiters_for_a_killed_producer(trio):
    owner, producer, consumer = trio
    number = producer.do("answer = produce()")
    consumer.do("events.order(told, copies.handle)", number)
    producer.kill()
    assert consumer.do("answer = [events.done(told), copies.done()]", number) == [False, False]
    owner.do("events.record(told, copies.handle); copies.wait()", number)
    consumer.do("copies.wait()")
    assert consumer.do("answer = events.done(told)", number) is True
