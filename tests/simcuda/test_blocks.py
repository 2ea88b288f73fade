"""Small allocations share blocks of 2 MiB, which is what a handle opens in another process."""

import pytest

from tests.simcuda.machine import lawful_machine, running_machine
from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

BLOCK = 2 << 20
# Two allocations side by side, and their handles.
EXPORT = """
start()
one, two = ok(d.cuMemAlloc(1000)), ok(d.cuMemAlloc(2000))
fill(one, 1, 1000); fill(two, 2, 2000); ok(d.cuCtxSynchronize())
answer = [raw(ok(d.cuIpcGetMemHandle(each))) for each in (one, two)]
"""
IMPORT = """
start()
first, second = (made(d.CUipcMemHandle, each) for each in told)

def open_handle(handle):
    return int(ok(d.cuIpcOpenMemHandle(handle, 1)))
"""
OPEN = IMPORT + "one, two = open_handle(first), open_handle(second)\n"


def test_small_allocations_lie_side_by_side(machine, worker):
    worker.do("start(); one, two, three = (int(ok(d.cuMemAlloc(n))) for n in (1, 600, 1 << 20))")
    assert worker.do("answer = two - one, three - one") == [512, 512 + 1024]
    assert machine.used(0) == BLOCK
    worker.do("large = int(ok(d.cuMemAlloc((1 << 20) + 1)))")
    assert machine.used(0) == 2 * BLOCK
    worker.do("for each in (one, three, large): ok(d.cuMemFree(each))")
    assert machine.used(0) == BLOCK
    # What was freed is not given again: who still uses it is seen to do so.
    assert worker.do("answer = int(ok(d.cuMemAlloc(1))) in (one, three)") is False
    worker.do("fill(two, 1, 600); ok(d.cuCtxSynchronize())")


@pytest.mark.parametrize("past", ["read(one + 500, 600)", "read(one + 1001, 10)"])
def test_a_neighbour_is_not_reached(past):
    with running_machine() as machine, running_worker(machine) as worker:
        worker.do(EXPORT + "one, two = int(one), int(two)")
        worker.refuses("ILLEGAL_ADDRESS", past)
        assert machine.violations()


def test_a_block_is_opened_once_and_each_opening_counts(one, two):
    two.do(OPEN, one.do(EXPORT))
    assert two.do("answer = two - one") == one.do("answer = int(two) - int(one)")
    assert two.do("answer = read(one, 1)[0], read(two + 1999, 1)[0]") == [1, 2]
    assert two.do("answer = open_handle(second) == two")
    two.do("ok(d.cuIpcCloseMemHandle(one)); ok(d.cuIpcCloseMemHandle(two)); read(two, 1)")
    two.do("ok(d.cuIpcCloseMemHandle(two))")
    # Opened anew it is another mapping.
    assert two.do("answer = open_handle(second) == two") is False


@pytest.mark.parametrize("handle", ["first", "second"])
def test_a_block_that_is_open_may_be_refused(machine, one, two, handle):
    machine.set(same_block="refused")
    two.do(IMPORT + "one = open_handle(first)", one.do(EXPORT))
    two.refuses("ALREADY_MAPPED", f"open_handle({handle})")
    two.do(f"ok(d.cuIpcCloseMemHandle(one)); open_handle({handle})")


def test_the_first_closing_may_unmap_all(careless, one, two):
    careless.set(same_block="closed-once")
    two.do(OPEN + "ok(d.cuIpcCloseMemHandle(one))", one.do(EXPORT))
    two.refuses("INVALID_VALUE", "ok(d.cuIpcCloseMemHandle(two))")
    two.refuses("ILLEGAL_ADDRESS", "read(two, 1)")


def test_memory_freed_beside_another_is_gone_for_its_importers(careless, one, two):
    two.do(OPEN, one.do(EXPORT))
    one.do("ok(d.cuMemFree(one))")
    two.do("read(two, 1)")
    two.refuses("ILLEGAL_ADDRESS", "read(one, 1)")


@pytest.mark.parametrize("what", ["stale", "held"])
def test_open_memory_may_outlive_its_process(what):
    with lawful_machine() as machine:
        machine.set(dead_exporter=what)
        machine.set_memory(BLOCK)
        with running_worker(machine) as owner, running_worker(machine) as other:
            other.do(OPEN, owner.do(EXPORT))
            owner.kill()
            assert other.do("answer = read(one, 1)[0]") == 1
            assert machine.used(0) == (BLOCK if what == "held" else 0)
            assert machine.used(0, owner.pid) == machine.used(0)
            assert machine.used(0, other.pid) == 0
            if what == "held":
                other.refuses("OUT_OF_MEMORY", "ok(d.cuMemAlloc(1))")
            else:
                other.do("ok(d.cuMemAlloc(1))")
            other.do("ok(d.cuIpcCloseMemHandle(one)); ok(d.cuIpcCloseMemHandle(two))")
            assert machine.used(0) == (0 if what == "held" else BLOCK)


def test_memory_open_at_a_contexts_end_is_noted(careless, one, two):
    two.do(OPEN, one.do(EXPORT))
    two.do("ok(d.cuIpcCloseMemHandle(one)); ok(d.cuDevicePrimaryCtxRelease(0))")
    (rule,) = careless.violations()
    assert "still open" in rule
