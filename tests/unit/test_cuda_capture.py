"""Calls of the bridge, in any thread, do not spoil a graph that a model captures."""

import pytest

pytest.importorskip("cuda.bindings")

GLOBAL, THREAD_LOCAL = range(2)

START = """
from gpubridge.cuda_ipc.context import relax_captures
from gpubridge.host_shm import Segment
copies = CopyStream(context)
host, back, other = pinned(64), pinned(64), Segment.create(1, 8192)
segment = mine(8192)
events = SharedEvents.create(context, 1)
events.record(0, copies.handle)
memory, kept = PinnedMemory(context), []
with context.pushed():
    theirs = ok(d.cuStreamCreate(1))
    pointer = ok(d.cuMemAlloc(64))

def mode():
    # That of this thread, which stays as it is.
    now = ok(d.cuThreadExchangeStreamCaptureMode(d.CUstreamCaptureMode(0)))
    ok(d.cuThreadExchangeStreamCaptureMode(now))
    return int(now)

def captured(work, mode, own):
    # What has become of a capture during which the bridge works, in this thread or another one.
    with context.pushed():
        pass
    ok(d.cuCtxSetCurrent(context.raw))
    ok(d.cuStreamBeginCapture(theirs, d.CUstreamCaptureMode(mode)))
    fill(pointer, 7, 64, theirs)
    failed = []
    def run():
        try:
            work()
        except Exception as error:
            failed.append(repr(error))
    if own:
        run()
    else:
        thread = threading.Thread(target=run); thread.start(); thread.join()
    return [int(d.cuStreamEndCapture(theirs)[0]), failed]
"""

WORK = [
    "copies.h2d(segment.pointer, host, 64), copies.d2h(back, segment.pointer, 64), copies.wait()",
    "copies.d2h(memoryview(bytearray(64)), segment.pointer, 64)",
    "copies.h2d(segment.pointer, memoryview(bytes(64)), 64)",
    "copies.mark().wait(), copies.mark().done(), copies.done()",
    "events.record(0, copies.handle), events.wait(0, 'another'), events.done(0)",
    "mine(4096, 2).close()",
    "kept.append(DeviceSegment.allocate(context, 3, 4096, by_fd=True))",
    "CopyStream(context).close()",
    "SharedEvents.create(context, 2).close()",
    "memory.pin(other.view), memory.close()",
]


@pytest.mark.parametrize(
    ("mode", "own"), [(GLOBAL, False), (GLOBAL, True), (THREAD_LOCAL, True)], ids=str
)
@pytest.mark.parametrize("work", WORK)
def test_work_of_the_bridge_spoils_no_capture(worker, work, mode, own):
    assert worker.do(f"answer = captured(lambda: ({work}), {mode}, {own})") == [0, []]


def test_the_mode_of_a_thread_is_the_models_own_again(worker):
    assert worker.do(
        """
answer = [mode()]
with context.pushed():
    answer.append(mode())
    with context.pushed():
        pass
    answer.append(mode())
answer.append(mode())
try:
    copies.d2d(12, 12, -1)
except Exception:
    answer.append(mode())
"""
    ) == [0, 2, 2, 0, 0]
    # So mistakes of the model's own are told as ever.
    assert worker.do("answer = captured(lambda: ok(d.cuMemAlloc(64)), 0, True)")[0] == 901


def test_a_thread_of_the_bridges_own_changes_its_mode_once(machine, worker):
    worker.do("relax_captures(); copies.done()")
    before = len(machine.calls())
    worker.do("copies.done(); relax_captures()")
    names = [call.name for call in machine.calls()[before:]]
    assert "cuThreadExchangeStreamCaptureMode" not in names


def test_the_capture_mode_is_restored_without_a_context(machine, worker):
    machine.fail("cuCtxPushCurrent", 201, nth=1)
    with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
        worker.do("ok(d.cuCtxSetCurrent(None)); copies.done()")
    assert worker.do("answer = mode()") == 0
    assert worker.do("copies.wait(); answer = copies.done()") is True
