"""After a fault a context does nothing more: neither what follows, nor what was recorded of that."""

import pytest

pytest.importorskip("cuda.bindings")


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
