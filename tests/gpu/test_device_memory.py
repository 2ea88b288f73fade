"""Device memory, copies and events between processes, on a machine that has a GPU."""

import os
import random
from collections.abc import Mapping

import pytest

from gpubridge.cuda_ipc import probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from tests.unit.cuda_workers import device_worker

FOUND = probe_devices()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND.count == 0, reason=f"no GPU can be used: {FOUND.reason}"),
]

SIZE = 1 << 20
PRODUCER = f"""
segment = mine({SIZE})
put(segment.pointer, bytes({SIZE}))
copies, host, back = CopyStream(context), pinned({SIZE}), pinned({SIZE})
host[:] = bytes(told) * ({SIZE} // 64)
with context.pushed():
    theirs = ok(d.cuStreamCreate(1))
    hold(theirs)
events = SharedEvents.create(context, 2)
answer = [list(segment.handle), [list(handle) for handle in events.handles]]
"""
CONSUMER = f"""
segment = DeviceSegment.open(context, 1, bytes(told[0]), {SIZE})
events = SharedEvents.open(context, [bytes(handle) for handle in told[1]])
copies, back = CopyStream(context), pinned({SIZE})
"""
# A stub: it records events that the server has made, of work that waits for `released`.
RECORDER = """
with context.pushed():
    theirs = int(ok(d.cuStreamCreate(1)))
    hold(theirs)
back[:] = bytes(told) * (len(back) // 64)
ring = EventRing(events)
copies.order_after(theirs)
copies.h2d(segment.pointer, back, len(back))
lease = ring.record(copies.handle)
answer = lease.number
"""
READ = f"copies.d2h(back, segment.pointer, {SIZE}); copies.wait(); answer = list(back[-64:])"


class ThisMachine:
    """The real one, for processes that usually run on a simulated one."""

    def environment(self) -> Mapping[str, str]:
        return os.environ


@pytest.fixture(scope="module")
def check():
    return check_device(FOUND.devices[0].uuid)


@pytest.fixture
def ipc(check):
    """Skip what needs IPC where the machine has none."""
    for ability in (check.memory, check.events):
        if not ability.works:
            pytest.skip(ability.reason)


def fresh():
    return [random.randrange(256) for _ in range(64)]


def worker():
    return device_worker(ThisMachine())


def test_the_kinds_of_shared_memory_here_are_reported(check, capsys):
    with capsys.disabled():
        print(f"\n{FOUND.devices[0]}\n{check}")
    assert check.pinning.works, check.pinning.reason


def test_copies_arrive_in_order(check):
    data = fresh()
    with worker() as one:
        one.do(PRODUCER.partition("events =")[0], data)
        assert (
            one.do(
                f"copies.h2d(segment.pointer, host, {SIZE})\n"
                f"copies.d2d(segment.pointer + {SIZE}, segment.pointer, {SIZE})\n"
                f"copies.d2h(back, segment.pointer + {SIZE}, {SIZE}); copies.wait()\n"
                "answer = list(back[-64:])"
            )
            == data
        )
        # Behind a stream that is held it waits, and the interpreter goes on meanwhile.
        assert one.do(
            "copies.order_after(int(theirs)); mark = copies.mark(); early = mark.done()\n"
            "threading.Timer(0.1, released.set).start(); mark.wait(); answer = [early, mark.done()]"
        ) == [False, True]


def test_memory_is_shared_and_events_order_it(ipc):
    """The server makes the events, one stub records them, another one waits."""
    data = fresh()
    with worker() as owner, worker() as producer, worker() as consumer:
        shared = owner.do(PRODUCER, fresh())
        producer.do(CONSUMER, shared)
        consumer.do(CONSUMER, shared)
        number = producer.do(RECORDER, data)
        assert consumer.do(
            "events.order(told, copies.handle); mark = copies.mark()\n"
            "answer = [events.done(told), mark.done()]",
            number,
        ) == [False, False]
        assert owner.do("answer = events.done(told)", number) is False
        producer.do("released.set()")
        assert consumer.do(READ) == data
        assert owner.do("answer = events.done(told)", number) is True


def test_a_host_waits_for_an_event_that_another_process_has_recorded(ipc):
    data = fresh()
    with worker() as owner, worker() as producer, worker() as consumer:
        shared = owner.do(PRODUCER, fresh())
        producer.do(CONSUMER, shared)
        consumer.do(CONSUMER, shared)
        number = producer.do(RECORDER + "threading.Timer(0.2, released.set).start()", data)
        assert consumer.do(f"events.wait(told, 'another'); {READ}", number) == data


def test_the_own_handle_and_more_than_there_is_are_refused(ipc):
    with worker() as owner, worker() as other:
        handle, _ = owner.do(PRODUCER, fresh())
        refused = "answer = refusal(open_client_region, context, bytes(told[0]), told[1])"
        kind, code, text = owner.do(refused, [handle, SIZE])
        assert (kind, code) == ("BridgeError", "INVALID_ARG"), text
        kind, code, text = other.do(refused, [handle, 1 << 40])
        assert (kind, code) == ("BridgeError", "INVALID_ARG"), text
        assert text.startswith(f"expected device memory of {1 << 40} bytes, got ")
        other.do("region = open_client_region(context, bytes(told), 64); region.close()", handle)


def test_a_process_that_dies_takes_no_memory_that_it_has_opened(ipc):
    data = fresh()
    with worker() as owner, worker() as other:
        other.do(CONSUMER, owner.do(PRODUCER, data))
        other.do(f"copies.h2d(segment.pointer, back, {SIZE})")
        other.kill()
        assert (
            owner.do(
                f"released.set(); copies.h2d(segment.pointer, host, {SIZE}); copies.wait()\n"
                f"answer = seen(segment.pointer + {SIZE} - 64, 64)"
            )
            == data
        )


@pytest.mark.last
def test_waiters_for_a_killed_producer_are_released(ipc, check):
    """The event is the owner's, who records it again: streams go on, and see whatever there is."""
    if not check.lost_events.works:
        pytest.skip(check.lost_events.reason)
    with worker() as owner, worker() as producer, worker() as consumer:
        shared = owner.do(PRODUCER, fresh())
        producer.do(CONSUMER, shared)
        consumer.do(CONSUMER, shared)
        number = producer.do(RECORDER, fresh())
        consumer.do("events.order(told, copies.handle)", number)
        producer.kill()
        # Whether the driver has let it pass by itself is of interest, and nothing hangs on it.
        print("passed by itself:", owner.do("answer = events.done(told)", number))
        owner.do("released.set(); events.record(told, copies.handle); copies.wait()", number)
        consumer.do("copies.wait()")
        assert consumer.do("answer = events.done(told)", number) is True
