"""Waits for a GPU sleep: whatever waits, for however long, leaves the processors to others."""

import contextlib
import math
import time

import pytest

from gpubridge.cuda_ipc import copies
from tests.unit.cuda_workers import device_worker, stub_device_worker
from tests.waits import poll

pytest.importorskip("cuda.bindings")

STUBS = 20
POLL_SECONDS = 20e-6
"""More than asking the driver once costs."""

# Another thread waits; how much of a processor that takes is in `spent` when it is over.
WAITING = """
import math
import time
spent = []

def wait(work):
    global thread
    def run():
        before = time.thread_time()
        work()
        spent.append(time.thread_time() - before)
    thread = threading.Thread(target=run); thread.start()
"""
HELD = (
    """
copies = CopyStream(context)
segment = mine(4096)
host = pinned(4096)
context.make_current()
hold(copies.handle)
copies.d2h(host, segment.pointer, 4096)
mark = copies.mark()
"""
    + WAITING
)


@pytest.mark.parametrize("call", ["copies.wait", "mark.wait", "copies.close"])
def test_a_long_wait_neither_spins_nor_polls(machine, device_process, call):
    def waited(seconds):
        def activity():
            return machine.activity(device_process.pid)

        assert poll(lambda: activity().slept + activity().spun > seconds, 100)
        return activity()

    device_process.do(HELD + f"wait({call})")
    before, now = waited(0.2), waited(0.4)
    assert (now.spun, now.polls) == (0, before.polls)
    device_process.do("released.set(); thread.join()")


def test_a_stream_that_gets_no_event_is_waited_for_asleep(machine, device_process):
    machine.fail("cuEventRecord", 2)
    device_process.do(HELD.replace("mark =", "#") + "wait(copies.wait); time.sleep(0.5)")
    device_process.do("released.set(); thread.join()")
    assert machine.activity(device_process.pid).spun == 0
    # So it was asked for less and less often, and takes as much of a processor as that.
    assert machine.activity(device_process.pid).polls < 200
    assert device_process.do("answer = [len(host), copies.counts.waits]") == [4096, 1]


def test_an_event_of_another_process_is_waited_for_asleep(machine):
    with device_worker(machine) as owner, device_worker(machine) as worker:
        owner.do("events = SharedEvents.create(context, 1); copies = CopyStream(context)")
        handles = owner.do("answer = [handle.hex() for handle in events.handles]")
        owner.do("context.make_current(); hold(copies.handle); events.record(0, copies.handle)")
        worker.do(WAITING)
        worker.do("events = SharedEvents.open(context, [bytes.fromhex(h) for h in told])", handles)
        worker.do("wait(lambda: events.wait(0, 'another')); time.sleep(1); assert not spent")
        owner.do("released.set()")
        (spent,) = worker.do("thread.join(); answer = spent")
        # An eighth of the second has passed when it asks for the last time.
        assert spent < 0.05
        assert machine.activity(worker.pid).spun == 0


def test_twenty_waiting_stubs_leave_the_processors_to_others(machine):
    """Each waits for what its model has begun; all of that together is under 5 % of one processor."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(stub_device_worker(machine)) for _ in range(STUBS)]
        for worker in workers:
            worker.do(
                WAITING + "hold(stream); data = device.allocate_device(64)\n"
                "data.hand_out(stream); copies = device.transfers(); copies.order(data); wait(copies.finish)"
            )
        before = [machine.activity(worker.pid) for worker in workers]
        seconds = 1.0
        time.sleep(seconds)
        now = [machine.activity(worker.pid) for worker in workers]
        assert all(b.slept - a.slept > seconds / 2 for a, b in zip(before, now, strict=True))
        spun = sum(b.spun - a.spun for a, b in zip(before, now, strict=True))
        polls = sum(b.polls - a.polls for a, b in zip(before, now, strict=True))
        assert spun + polls * POLL_SECONDS < 0.05 * seconds
        for worker in workers:
            worker.do("released.set(); thread.join()")


class Clock:
    """Time that passes only in sleeps and queries."""

    def __init__(self, done_at):
        self.now = 0.0
        self.asked = 0
        self.done_at = done_at

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def done(self):
        self.asked += 1
        self.now += 2e-6
        return self.now >= self.done_at


def test_a_wait_has_an_end(monkeypatch):
    clock = Clock(math.inf)
    monkeypatch.setattr(copies, "time", clock)
    assert copies.sleep_until(clock.done, 60.0) is False
    assert 60.0 <= clock.now <= 60.03


@pytest.mark.parametrize("done_at", [0.0, 20e-6, 200e-6, 0.001, 0.05, 10.0])
def test_a_wait_ends_soon_after_what_it_is_for(monkeypatch, done_at):
    clock = Clock(done_at)
    monkeypatch.setattr(copies, "time", clock)
    copies.sleep_until(clock.done)
    late = clock.now - done_at
    assert late <= max(4e-6, min(done_at / 7, 0.021))
    # Short ones are over at once, for at most 100 us of a processor; long ones take next to nothing.
    assert clock.asked <= 100 + 60 * done_at
