"""Waits of the simulated driver: which of them burn a processor is counted, none of them does."""

import pytest

from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

# Work that is not done until `released`, and an event behind it; another thread waits for one of both.
HELD = """
start()
stream, event = ok(d.cuStreamCreate(1)), ok(d.cuEventCreate(2 | told))
memory = ok(d.cuMemAlloc(64)); context = ok(d.cuCtxGetCurrent())
hold(stream); ok(d.cuEventRecord(event, stream))
pageable = bytearray(64)

def wait(call):
    global thread
    thread = threading.Thread(target=lambda: (ok(d.cuCtxSetCurrent(context)), ok(call())))
    thread.start()
"""
BLOCKING_EVENT = 1
BLOCKING_CONTEXT = "ok(d.cuInit(0)); ok(d.cuDevicePrimaryCtxSetFlags(0, 4))"

OF_THE_STREAM = [
    "d.cuStreamSynchronize(stream)",
    "d.cuCtxSynchronize()",
    "d.cuMemcpyDtoHAsync(pageable, memory, 64, stream)",
    "d.cuMemFree(memory)",
]
OF_THE_EVENT = "d.cuEventSynchronize(event)"


def kinds_of_waiting(machine, worker, call):
    """Return how a process waits for the work that is held: read while it does."""
    worker.do(f"wait(lambda: {call})")
    before = machine.activity(worker.pid)
    while True:
        now = machine.activity(worker.pid)
        kinds = [kind for kind in ("spun", "slept") if getattr(now, kind) > getattr(before, kind)]
        if kinds:
            worker.do("released.set(); thread.join()")
            return kinds


@pytest.mark.parametrize("call", [*OF_THE_STREAM, OF_THE_EVENT])
def test_a_wait_spins_unless_told_otherwise(machine, worker, call):
    worker.do(HELD, 0)
    assert kinds_of_waiting(machine, worker, call) == ["spun"]


@pytest.mark.parametrize("call", OF_THE_STREAM)
def test_in_a_context_of_blocking_waits_it_sleeps(machine, worker, call):
    worker.do(BLOCKING_CONTEXT + HELD, 0)
    assert kinds_of_waiting(machine, worker, call) == ["slept"]


def test_of_an_event_its_own_flag_decides(machine):
    with running_worker(machine) as worker:
        worker.do(HELD, BLOCKING_EVENT)
        assert kinds_of_waiting(machine, worker, OF_THE_EVENT) == ["slept"]
    with running_worker(machine) as worker:
        worker.do(BLOCKING_CONTEXT + HELD, 0)
        assert kinds_of_waiting(machine, worker, OF_THE_EVENT) == ["spun"]


def test_questions_are_counted(machine, worker):
    worker.do(HELD, 0)
    worker.do("for _ in range(3): d.cuEventQuery(event); d.cuStreamQuery(stream)")
    found = machine.activity(worker.pid)
    assert (found.polls, found.spun, found.slept) == (6, 0, 0)
    worker.do("released.set()")
