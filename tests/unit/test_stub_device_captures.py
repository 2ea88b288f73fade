"""A stub's device memory while its model captures a graph: nothing of the bridge gets into it."""

from __future__ import annotations

import pytest

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
        "del data; device.settle(); device.settle(); answer = [device.busy, end(taken)]"
    ) == [True, 0]
    assert worker.do("passed(); answer = room_for(whole)")


def test_other_memory_goes_back_meanwhile(worker):
    assert worker.do(
        "mine = int(ok(d.cuStreamCreate(1))); kept = device.allocate_device(64); kept.hand_out(stream);"
        "data = device.allocate_device(whole // 2); data.hand_out(mine); begin(stream, 0);"
        "del kept, data; device.settle(); ok(d.cuThreadExchangeStreamCaptureMode("
        "d.CUstreamCaptureMode(2))); ok(d.cuStreamSynchronize(mine)); device.settle();"
        "answer = [room_for(whole // 2), end(stream)]"
    ) == [True, 0]


def test_what_was_not_collected_for_an_error_is_collected_later(machine, worker):
    worker.do("data = device.allocate_device(whole); data.hand_out(stream); del data")
    machine.fail("cuStreamWaitEvent", CAPTURE_UNSUPPORTED)
    assert worker.do("device.settle(); answer = [device.busy, device.lost is None]") == [True, True]
    machine.heal()
    assert not machine.calls("cuCtxSynchronize", worker.pid)
    machine.fail("cuEventRecord", CAPTURE_UNSUPPORTED, nth=2)
    assert worker.do("device.settle(); answer = device.busy")
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
