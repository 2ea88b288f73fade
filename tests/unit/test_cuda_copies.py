"""Copies on a stream of their own: values, order, and exactly the calls that are needed."""

import pytest

from tests.simcuda.machine import running_machine
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

START = """
segment = mine(8192)
a, b = segment.pointer, segment.pointer + 4096
put(a, bytes(4096)); put(b, bytes(4096))
copies = CopyStream(context)
host, back = pinned(4096), pinned(4096)
host[:] = bytes([7]) * 4096
with context.pushed():
    theirs = ok(d.cuStreamCreate(1))
    hold(theirs)
"""


def names_since(machine, index):
    return [call.name for call in machine.calls()[index:]]


def test_copies_arrive_and_are_counted_by_kind(machine, worker):
    machine.delay(2000)
    assert worker.do(
        "copies.h2d(a, host, 4096); copies.d2d(b + 10, a, 100); copies.d2h(back, b, 4096)\n"
        "copies.wait(); answer = list(back[9:11]) + list(back[109:111])"
    ) == [0, 7, 7, 0]
    assert worker.do(
        "answer = [copies.counts.copied, copies.counts.copies, copies.counts.waits]"
    ) == [
        {"h2d": 4096, "d2d": 100, "d2h": 4096, "p2p": 0},
        {"h2d": 1, "d2d": 1, "d2h": 1, "p2p": 0},
        1,
    ]
    assert [call.arguments for call in machine.calls("cuMemcpyHtoDAsync")] == [(4096, 1)]
    assert [call.arguments for call in machine.calls("cuMemcpyDtoHAsync")] == [(4096, 1)]


def test_a_copy_is_one_call_where_the_device_is_current(machine, worker):
    worker.do("context.make_current()")
    before = len(machine.calls())
    worker.do("copies.d2d(b, a, 4096)")
    mode = "cuThreadExchangeStreamCaptureMode"
    assert names_since(machine, before) == [mode, "cuCtxGetCurrent", "cuMemcpyDtoDAsync", mode]


def test_several_copies_are_no_other_calls(machine, worker):
    worker.do("outer = context.pushed(); outer.__enter__()")
    before = len(machine.calls())
    worker.do("copies.d2d(b, a, 4096); copies.d2d(a, b, 4096)")
    assert names_since(machine, before) == ["cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync"]
    worker.do("outer.__exit__()")
    worker.do("copies.d2d(b, a, 4096)")
    assert "cuCtxPushCurrent" in names_since(machine, before)


def test_nothing_is_made_in_steady_state(machine, worker):
    step = (
        "copies.order_after(0); copies.h2d(a, host, 64); copies.order_before(1)\n"
        "copies.mark().wait(); copies.d2h(back, a, 64); copies.wait()"
    )
    worker.do(step)
    before = len(machine.calls())
    worker.do(step)
    assert set(names_since(machine, before)) - {"cuEventSynchronize"} == {
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuStreamIsCapturing",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventQuery",
    }
    assert len(machine.calls("cuEventCreate")) == 1


def test_no_bytes_are_no_call(machine, worker):
    before = len(machine.calls())
    worker.do("copies.h2d(0, host, 0); copies.d2h(back, 0, 0); copies.d2d(0, 0, 0)")
    assert names_since(machine, before) == []
    assert worker.do("answer = sum(copies.counts.copies.values())") == 0


def test_too_little_or_read_only_memory_is_refused(machine, worker):
    before = len(machine.calls())
    for misuse in (
        "copies.h2d(a, host[:10], 11)",
        "copies.d2h(back[:10], a, 11)",
        "copies.h2d(a, host[::2], 10)",
    ):
        with pytest.raises(RuntimeError, match="contiguous bytes of host memory"):
            worker.do(misuse)
    with pytest.raises(RuntimeError, match="expected writable memory"):
        worker.do("copies.d2h(memoryview(bytes(10)), a, 10)")
    assert names_since(machine, before) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_a_copy_waits_for_the_stream_that_makes_the_tensor(worker, ordered):
    worker.do("with context.pushed(): fill(a, 9, 4096, theirs)")
    if ordered:
        worker.do("copies.order_after(int(theirs)); released.set()")
    worker.do("copies.d2h(back, a, 4096); copies.wait()")
    assert worker.do("answer = back[0]") == (9 if ordered else 0)


def test_a_mark_means_what_was_to_do_when_it_was_made(worker):
    assert worker.do(
        "early = copies.mark(); copies.order_after(int(theirs)); late = copies.mark()\n"
        "early.wait(); answer = [early.done(), late.done(), copies.done()]"
    ) == [True, False, False]
    assert worker.do(
        "released.set(); late.wait(); answer = [late.done(), copies.counts.waits]"
    ) == [True, 2]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("what", ["copies", "mark"])
def test_another_stream_waits_for_a_copy_or_a_mark(worker, what, ordered):
    worker.do("copies.order_after(int(theirs)); copies.h2d(a, host, 4096); mark = copies.mark()")
    worker.do("with context.pushed(): second = ok(d.cuStreamCreate(1))")
    if ordered:
        worker.do(f"{what}.order_before(int(second)); released.set()")
    assert worker.do(
        "with context.pushed():\n"
        "    ok(d.cuMemcpyDtoDAsync(b, a, 4096, second)); ok(d.cuStreamSynchronize(second))\n"
        "answer = seen(b)"
    ) == ([7] if ordered else [0])
    worker.do("released.set()")


def test_the_event_of_a_mark_goes_back_with_it(machine, worker):
    worker.do("one = copies.mark(); two = copies.mark()")
    assert len(machine.calls("cuEventCreate")) == 2
    worker.do("del one, two; marks = [copies.mark(), copies.mark()]")
    assert len(machine.calls("cuEventCreate")) == 2


def test_waits_release_the_interpreter(worker):
    assert worker.do(
        "copies.order_after(int(theirs)); seen_meanwhile = []\n"
        "def other(): seen_meanwhile.append(copies.done()); released.set()\n"
        "thread = threading.Timer(0.05, other); thread.start()\n"
        "copies.wait(); thread.join(); answer = seen_meanwhile"
    ) == [False]


def test_any_thread_may_copy_whatever_is_current_there(worker):
    assert worker.do(
        "def work():\n"
        "    DeviceContext(list_devices()[1]).make_current()\n"
        "    copies.h2d(a, host, 4096); copies.wait(); current.append(int(ok(d.cuCtxGetDevice())))\n"
        "current = []\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "answer = current + seen(a)"
    ) == [1, 7]


def test_a_lost_context_is_told_as_such():
    # The illegal access is the test's: it is noted, and expected.
    with running_machine() as machine, device_worker(machine) as worker:
        worker.do(START)
        with pytest.raises(RuntimeError, match=r"ILLEGAL_ADDRESS.*started again"):
            worker.do("copies.d2d(12345, a, 10); copies.wait()")
        assert worker.do("answer = attributes(copies.wait)[3]") is True
        assert worker.do("answer = attributes(copies.h2d, a, host, 1)[3]") is True
        assert "not allocated" in machine.violations()[0]


def test_a_closed_stream_copies_nothing_and_has_waited(machine, worker):
    worker.do("released.set(); mark = copies.mark(); copies.d2d(b, a, 1)")
    worker.do("copies.close(); copies.close()")
    for use in (
        "copies.h2d(a, host, 1)",
        "copies.wait()",
        "copies.done()",
        "copies.mark()",
        "copies.order_before(0)",
        "copies.order_after(0)",
    ):
        with pytest.raises(RuntimeError, match="copy stream is closed"):
            worker.do(use)
    worker.do("assert mark.done(); mark.wait(); mark.order_before(0); del mark; gc.collect()")
    destroyed = [len(machine.calls(name)) for name in ("cuEventDestroy", "cuStreamDestroy")]
    assert destroyed == [len(machine.calls("cuEventCreate")), 1]


def test_closing_waits_for_what_is_under_way(machine, worker):
    machine.delay(20_000)
    worker.do("copies.h2d(a, host, 4096); copies.close()")
    assert worker.do("answer = seen(a)") == [7]
