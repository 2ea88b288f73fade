"""A stub's device memory while its model captures a graph: nothing of the bridge gets into it."""

import pytest

from tests.waits import polling

INVALID_HANDLE, CAPTURE_UNSUPPORTED = 400, 900

# A graph is captured on `taken`, in each mode that there is.
CAPTURE = """
def begin(taken, mode):
    ok(d.cuStreamBeginCapture(taken, d.CUstreamCaptureMode(mode)))
    fill(source, 7, 64, taken)

def end(taken):
    return int(d.cuStreamEndCapture(taken)[0])

source, context = ok(d.cuMemAlloc(64)), ok(d.cuCtxGetCurrent())
taken = stream
"""
BLOCKING = "taken = int(ok(d.cuStreamCreate(0)))"


@pytest.fixture
def worker(stub_device_process):
    stub_device_process.do(CAPTURE)
    return stub_device_process


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
@pytest.mark.parametrize(
    ("capture", "used"),
    [("", "stream"), (BLOCKING, "1"), (BLOCKING, "-1")],
    ids=["own stream", "legacy", "unnamed"],
)
def test_memory_of_a_captured_stream_goes_back_when_the_capture_has_ended(
    worker, mode, capture, used
):
    worker.do(capture)
    worker.do(f"data = device.allocate_device(whole); data.hand_out({used}); begin(taken, {mode})")
    assert worker.do(
        "del data; device.reclaim(); device.reclaim(); answer = [device.busy, end(taken)]"
    ) == [True, 0]
    assert worker.do("passed(); answer = room_for(whole)")


def test_other_memory_goes_back_meanwhile(worker):
    assert worker.do(
        "mine = new_stream(); kept = device.allocate_device(64); kept.hand_out(stream);"
        "data = device.allocate_device(whole // 2); data.hand_out(mine); begin(stream, 0);"
        "del kept, data; device.reclaim(); ok(d.cuThreadExchangeStreamCaptureMode("
        "d.CUstreamCaptureMode(2))); ok(d.cuStreamSynchronize(mine)); device.reclaim();"
        "answer = [room_for(whole // 2), end(stream)]"
    ) == [True, 0]


def test_memory_not_freed_after_an_error_is_freed_later(machine, worker):
    worker.do("data = device.allocate_device(whole); data.hand_out(stream); del data")
    machine.fail("cuStreamWaitEvent", CAPTURE_UNSUPPORTED)
    assert worker.do("device.reclaim(); answer = [device.busy, device.lost is None]") == [
        True,
        True,
    ]
    machine.heal()
    assert not machine.calls("cuCtxSynchronize", worker.pid)
    machine.fail("cuEventRecord", CAPTURE_UNSUPPORTED, nth=2)
    assert worker.do("device.reclaim(); answer = device.busy")
    machine.heal()
    assert worker.do("passed(); answer = room_for(whole)")


@pytest.mark.parametrize("capture", ["", BLOCKING], ids=["own stream", "legacy"])
def test_a_graph_waits_for_nothing_that_is_not_of_it(worker, capture):
    worker.do(capture)
    assert worker.do(
        "data = device.upload(memoryview(bytearray(64))); begin(taken, 0);"
        "data.hand_out(stream if taken == stream else 1);"
        "answer = [end(taken), data.ready.done()]"
    ) == [0, True]


def test_a_tensor_of_a_captured_stream_is_read_when_the_capture_has_ended(worker):
    assert worker.do(
        "data = device.allocate_device(64); data.hand_out(stream); begin(stream, 2);"
        "target = memoryview(bytearray(64)); ended = [];"
        "threading.Timer(0.2, lambda: (d.cuCtxSetCurrent(context), ended.append(end(stream)))).start();"
        "device.copy_to_host(data, target); answer = list(ended)"
    ) == [0]


# The device has two events, as if its arena were shared.
EVENTS = """
from gpubridge.cuda_ipc import EventRing, SharedEvents
events, edges = SharedEvents.create(device._require().context, 2), device.events
edges._begun, edges._own, edges._ring = True, events, EventRing(events)
"""


# A thread of the model's begins a capture on `taken` when the bridge has just asked for one, and ends it a little later.
RACE = """
import threading, time
from gpubridge.cuda_ipc import CopyStream
asks, ended = CopyStream.wait_for_capture, []

def race(self, asked, deadline):
    asks(self, asked, deadline)
    if asked == taken and not ended:
        CopyStream.wait_for_capture = asks
        begin(taken, 2)
        def later():
            time.sleep(0.05)
            ok(d.cuCtxSetCurrent(context))
            device.events.sweep()
            ended.append(end(taken))
        threading.Thread(target=later).start()

CopyStream.wait_for_capture = race
"""
# The thread says so a moment after the capture has ended.
UNTIL_ENDED = polling("ended")


def test_a_capture_that_begins_after_the_question_takes_nothing_of_the_bridge(worker):
    worker.do("data = device.allocate_device(whole); data.hand_out(stream)" + "\n" + RACE)
    assert worker.do(
        f"del data; device.reclaim(); device.reclaim()\n{UNTIL_ENDED}\n"
        "answer = [ended, device.lost is None]"
    ) == [[0], True]
    worker.do("passed(); answer = room_for(whole)")


def test_an_event_that_a_capture_has_taken_is_recorded_again(worker):
    worker.do(RACE + EVENTS)
    assert worker.do(
        "lease = edges.record({taken}, device.transfers(), int); ok(d.cuCtxSynchronize())\n"
        f"done = events.done(lease.number)\n{UNTIL_ENDED}\n"
        "answer = [ended, done]"
    ) == [[0], True]


def test_an_event_that_a_capture_has_taken_is_not_queried_for_its_last_record(worker):
    worker.do(EVENTS)
    worker.do("for _ in range(2): edges.record({taken}, device.transfers(), int)\n" + RACE)
    assert worker.do(
        "lease = edges.record({taken}, device.transfers(), int); ok(d.cuCtxSynchronize())\n"
        "done, recorded = events.done(lease.number), list(edges._recorded) == [lease.number]\n"
        f"{UNTIL_ENDED}\nanswer = [ended, done, recorded]"
    ) == [[0], True, True]


# A capture that begins just before a record, and ends just after it.
SHORT_RACE = """
record, ended = SharedEvents.record, []

def race(self, number, asked):
    SharedEvents.record = record
    begin(taken, 0)
    try:
        record(self, number, asked)
    finally:
        ended.append(end(taken))

SharedEvents.record = race
"""


@pytest.mark.parametrize(
    ("capture", "asked"), [("", "stream"), (BLOCKING, "1")], ids=["own stream", "legacy"]
)
def test_an_event_is_recorded_again_when_a_capture_has_ended_meanwhile(worker, capture, asked):
    worker.do(f"{capture}\n{EVENTS}\n{SHORT_RACE}")
    assert worker.do(
        f"lease = edges.record({{{asked}}}, device.transfers(), int); ok(d.cuCtxSynchronize())\n"
        "answer = [len(ended), events.done(lease.number)]"
    ) == [1, True]
