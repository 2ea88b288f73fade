"""Events between processes: what becomes of those of the dead, and where none can be had."""

import contextlib

import pytest

from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

# The server's part: it makes the event. A recorder records it behind work that never ends; a reader waits.
MAKE = "start(); event = ok(d.cuEventCreate(2 | 4)); answer = raw(ok(d.cuIpcGetEventHandle(event)))"
OPEN = """
start()
event = ok(d.cuIpcOpenEventHandle(made(d.CUipcEventHandle, told)))
stream = ok(d.cuStreamCreate(1))
"""
HELD = OPEN + "hold(stream); ok(d.cuEventRecord(event, stream))"
WAITING = OPEN + "ok(d.cuStreamWaitEvent(stream, event, 0))"
STATE = "answer = int(d.cuStreamQuery(stream)[0]), int(d.cuEventQuery(event)[0])"
DONE, NOT_READY = 0, 600


@contextlib.contextmanager
def waiting_reader(machine, killed_recorder):
    """Start a server, a recorder whose work is held, and a reader that waits for its event."""
    machine.set(killed_recorder=killed_recorder)
    with (
        running_worker(machine) as server,
        running_worker(machine) as recorder,
        running_worker(machine) as reader,
    ):
        handle = server.do(MAKE)
        recorder.do(HELD, handle)
        reader.do(WAITING, handle)
        assert reader.do(STATE) == [NOT_READY, NOT_READY]
        yield server, recorder, reader


@pytest.mark.parametrize(
    ("becomes", "when_killed", "recorded_anew"),
    [
        ("rerecord", NOT_READY, DONE),
        ("released", DONE, DONE),
        ("never", NOT_READY, NOT_READY),
    ],
)
def test_waits_for_a_killed_recorder(machine, becomes, when_killed, recorded_anew):
    with waiting_reader(machine, becomes) as (server, recorder, reader):
        recorder.kill()
        if when_killed == DONE:
            reader.do("ok(d.cuStreamSynchronize(stream))")
        assert reader.do(STATE) == [when_killed, when_killed]
        server.do("ok(d.cuEventRecord(event, 0)); ok(d.cuStreamSynchronize(0))")
        if recorded_anew == DONE:
            reader.do("ok(d.cuStreamSynchronize(stream))")
        # The record that is new has come, whatever became of the one before it.
        assert reader.do(STATE) == [recorded_anew, DONE]


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("becomes", ["passes", "never"])
def test_waits_for_a_recorder_that_is_done_and_gone(machine, becomes, killed):
    machine.set(exited_recorder=becomes)
    with (
        running_worker(machine) as server,
        running_worker(machine) as recorder,
        running_worker(machine) as reader,
    ):
        handle = server.do(MAKE)
        recorder.do(
            OPEN + "ok(d.cuEventRecord(event, stream)); ok(d.cuEventSynchronize(event))", handle
        )
        reader.do(WAITING + "; ok(d.cuStreamSynchronize(stream))", handle)
        if killed:
            recorder.kill()
        else:
            recorder.do("ok(d.cuEventDestroy(event))")
        reader.do("ok(d.cuStreamWaitEvent(stream, event, 0))")
        if becomes == "never":
            assert reader.do(STATE) == [NOT_READY, NOT_READY]
            server.do("ok(d.cuEventRecord(event, 0)); ok(d.cuStreamSynchronize(0))")
        reader.do("ok(d.cuStreamSynchronize(stream))")
        assert reader.do(STATE) == [DONE, DONE]


@pytest.mark.parametrize("becomes", ["rerecord", "released", "never"])
def test_the_living_are_waited_for(machine, becomes):
    with waiting_reader(machine, becomes) as (_, recorder, reader):
        recorder.do("released.set()")
        reader.do("ok(d.cuStreamSynchronize(stream)); ok(d.cuEventSynchronize(event))")


def test_events_do_not_cross_to_another_shm(machine):
    with (
        running_worker(machine, {"SIMCUDA_SHM": "host"}) as server,
        running_worker(machine, {"SIMCUDA_SHM": "host"}) as same,
        running_worker(machine, {"SIMCUDA_SHM": "container"}) as other,
    ):
        handle = server.do(MAKE)
        same.do(OPEN, handle)
        other.refuses("MAP_FAILED", OPEN, handle)


def test_the_events_that_others_may_open_come_to_an_end(machine, worker):
    machine.set(event_limit=2)
    worker.do("start(); first, second = ok(d.cuEventCreate(6)), ok(d.cuEventCreate(6))")
    worker.refuses("OUT_OF_MEMORY", "ok(d.cuEventCreate(6))")
    worker.do("ok(d.cuEventCreate(2)); ok(d.cuEventDestroy(first)); ok(d.cuEventCreate(6))")


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_of_pageable_memory_may_wait_for_the_stream(machine, worker, waits):
    machine.set(pageable="waits" if waits else "staged")
    worker.do("start(); a = ok(d.cuMemAlloc(64)); context = ok(d.cuCtxGetCurrent())")
    worker.do("stream = ok(d.cuStreamCreate(1)); hold(stream); host = bytes(64)")
    worker.do(
        "def copy():\n"
        "    ok(d.cuCtxSetCurrent(context)); ok(d.cuMemcpyHtoDAsync(a, host, 64, stream))\n"
        "thread = threading.Thread(target=copy); thread.start()"
    )
    if waits:
        while not machine.activity(worker.pid).spun:
            pass
        assert machine.calls("cuMemcpyHtoDAsync") == []
    else:
        worker.do("thread.join()")
    worker.do("released.set(); thread.join()")
