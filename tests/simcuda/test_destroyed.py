"""Handles of what was destroyed are undefined: each misuse is planted, and does its harm."""

import pytest

pytest.importorskip("cuda.bindings")

# A stream and an event that a library had, and has destroyed; somebody else has kept their handles.
KEPT = """
start()
a, b = ok(d.cuMemAlloc(64)), ok(d.cuMemAlloc(64))
fill(a, 1, 64); fill(b, 2, 64); ok(d.cuCtxSynchronize())
stream, event = ok(d.cuStreamCreate(1)), ok(d.cuEventCreate(2))
hold(stream); fill(a, 5, 64, stream)
kept, mark = int(stream), int(event)
ok(d.cuEventDestroy(event)); ok(d.cuStreamDestroy(stream))
"""
USES = [
    "d.cuEventRecord(ok(d.cuEventCreate(2)), kept)",
    "d.cuStreamWaitEvent(kept, ok(d.cuEventCreate(2)), 0)",
    "d.cuMemcpyDtoDAsync(b, a, 64, kept)",
    "d.cuStreamSynchronize(kept)",
    "d.cuStreamDestroy(kept)",
    "d.cuEventQuery(mark)",
    "d.cuStreamWaitEvent(0, mark, 0)",
    "d.cuEventDestroy(mark)",
]


@pytest.mark.parametrize("use", USES)
def test_until_a_handle_is_given_again_its_use_is_noted(careless, worker, use):
    # The event that the use itself may create must not be the one that was destroyed.
    if "cuEventCreate" in use:
        use = use.replace("ok(d.cuEventCreate(2))", "fresh")
    worker.do("start(); fresh = ok(d.cuEventCreate(2))" + KEPT)
    worker.refuses("INVALID_HANDLE", f"ok({use})")
    assert "was destroyed" in careless.violations()[0]


def test_the_next_one_that_is_created_has_the_handle(worker):
    worker.do(KEPT)
    assert worker.do(
        "answer = int(ok(d.cuStreamCreate(1))) == kept, int(ok(d.cuEventCreate(2))) == mark"
    ) == [True, True]


def test_a_late_record_means_an_unrelated_stream(worker):
    worker.do(KEPT)
    worker.do("unrelated, own = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1))")
    # Whoever orders a copy behind the stream that he knows takes it before that has written.
    worker.do("sign = ok(d.cuEventCreate(2)); ok(d.cuEventRecord(sign, kept))")
    worker.do("ok(d.cuStreamWaitEvent(own, sign, 0)); ok(d.cuMemcpyDtoDAsync(b, a, 64, own))")
    worker.do("ok(d.cuStreamSynchronize(own)); released.set(); ok(d.cuCtxSynchronize())")
    assert worker.do("answer = read(a, 1)[0], read(b, 1)[0]") == [5, 1]


def test_a_late_record_may_wait_for_what_is_not_its_own(worker):
    worker.do("start(); stream = ok(d.cuStreamCreate(1)); kept = int(stream)")
    worker.do("ok(d.cuStreamDestroy(stream)); unrelated = ok(d.cuStreamCreate(1))")
    worker.do("hold(unrelated); sign = ok(d.cuEventCreate(2))")
    worker.do("ok(d.cuEventRecord(sign, kept)); answer = int(d.cuEventQuery(sign)[0])")
    assert worker.do("answer = int(d.cuEventQuery(sign)[0])") == 600
    worker.do("released.set()")


def test_a_record_of_all_streams_comes_after_what_a_destroyed_one_has_to_do(worker):
    worker.do(KEPT + "sign = ok(d.cuEventCreate(2)); context = ok(d.cuCtxGetCurrent())")
    worker.do("ok(d.cuCtxRecordEvent(context, sign)); own = ok(d.cuStreamCreate(1))")
    worker.do("ok(d.cuStreamWaitEvent(own, sign, 0)); ok(d.cuMemcpyDtoDAsync(b, a, 64, own))")
    assert worker.do("answer = int(d.cuEventQuery(sign)[0])") == 600
    worker.do("released.set(); ok(d.cuStreamSynchronize(own))")
    assert worker.do("answer = read(b, 1)[0]") == 5


@pytest.mark.parametrize("look", ["d.cuCtxRecordEvent(context, sign)", "d.cuCtxSynchronize()"])
def test_who_looks_at_all_streams_spoils_each_capture(worker, look):
    worker.do("start(); stream = ok(d.cuStreamCreate(1)); context = ok(d.cuCtxGetCurrent())")
    worker.do("sign = ok(d.cuEventCreate(2)); relaxed = d.CUstreamCaptureMode(2)")
    worker.do("ok(d.cuThreadExchangeStreamCaptureMode(relaxed))")
    worker.do("ok(d.cuStreamBeginCapture(stream, relaxed))")
    worker.refuses("CAPTURE_UNSUPPORTED", f"ok({look})")
    worker.refuses("CAPTURE_INVALIDATED", "ok(d.cuStreamEndCapture(stream))")


def test_handles_may_stay_refused(careless, worker):
    careless.set(destroyed="refused")
    worker.do(KEPT + "ok(d.cuStreamCreate(1)); ok(d.cuEventCreate(2))")
    for use in ("d.cuStreamQuery(kept)", "d.cuEventQuery(mark)"):
        worker.refuses("INVALID_HANDLE", f"ok({use})")


@pytest.mark.parametrize("use", ["d.cuStreamQuery(kept)", "d.cuEventRecord(mark, 0)"])
def test_their_use_may_be_the_end_of_the_process(careless, worker, use):
    careless.set(destroyed="crash")
    worker.do(KEPT)
    with pytest.raises(EOFError, match="-11"):
        worker.do(use)
