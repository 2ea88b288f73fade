"""After a fault a context does nothing more: neither what follows, nor what was recorded of that."""

import pytest

pytest.importorskip("cuda.bindings")


def test_of_a_device_that_is_lost_nothing_is_done_and_nothing_more_is_had(machine, one, two):
    one.do("start(); a = ok(d.cuMemAlloc(64)); stream = ok(d.cuStreamCreate(1)); hold(stream)")
    one.do("event = ok(d.cuEventCreate(2)); ok(d.cuEventRecord(event, stream))")
    machine.set(lost_device=0)
    for call in ("d.cuStreamQuery(stream)", "d.cuMemAlloc(64)", "d.cuEventSynchronize(event)"):
        one.refuses("UNKNOWN", f"ok({call})")
    two.refuses("UNKNOWN", "start()")
    two.do("assert ok(d.cuDeviceGetCount()) == 2; start(1); ok(d.cuMemAlloc(64))")
    machine.set(lost_device=-1)
    # Another process may have the device again, this one not.
    one.refuses("UNKNOWN", "ok(d.cuMemAlloc(64))")
    two.do("start()")


@pytest.mark.parametrize("sticks", [True, False])
def test_an_unknown_error_is_one_calls_or_stays(machine, worker, sticks):
    machine.set(unknown="sticks" if sticks else "passes")
    worker.do("start()")
    machine.fail("cuMemAlloc", 999, nth=1)
    worker.refuses("UNKNOWN", "ok(d.cuMemAlloc(64))")
    if sticks:
        worker.refuses("UNKNOWN", "ok(d.cuMemGetInfo())")
    else:
        worker.do("ok(d.cuMemAlloc(64))")


def test_of_a_context_that_is_lost_nothing_more_is_done(careless, one, two, tmp_path):
    shared = tmp_path / "seen"
    handle = one.do(
        "start(); event = ok(d.cuEventCreate(6)); answer = raw(ok(d.cuIpcGetEventHandle(event)))"
    )
    two.do(
        "start(); stream = ok(d.cuStreamCreate(1))\n"
        "event = ok(d.cuIpcOpenEventHandle(made(d.CUipcEventHandle, told[0])))\n"
        "seen = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: open(told[1], 'w').close())\n"
        "hold(stream); ok(d.cuMemsetD8Async(12345, 0, 1, stream))\n"
        "ok(d.cuLaunchHostFunc(stream, ctypes.cast(seen, ctypes.c_void_p).value, 0))\n"
        "ok(d.cuEventRecord(event, stream)); released.set()\n",
        [handle, str(shared)],
    )
    two.refuses("ILLEGAL_ADDRESS", "ok(d.cuStreamSynchronize(stream))")
    one.refuses("NOT_READY", "ok(d.cuEventQuery(event))")
    assert not shared.exists()
    (rule,) = careless.violations()
    assert "not allocated" in rule
