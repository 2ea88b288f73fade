"""Pinning in the background: no request waits for the driver, whatever is added or removed meanwhile."""

import pytest

from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

MIB = 1 << 20
OUT_OF_MEMORY = 2

# `slow` lets the driver's registering take until `go` is set; `begun` counts registrations.
START = """
import os
import gpubridge.cuda_ipc.pinned as pinned_memory
from gpubridge.host_shm import Segment
from gpubridge.stub.device.pinning import HostPinning

said, begun, go = [], threading.Semaphore(0), threading.Event()
driver_call = pinned_memory.call

def slow():
    def call(name, *arguments):
        if name == "cuMemHostRegister":
            begun.release(); go.wait()
        return driver_call(name, *arguments)
    pinned_memory.call = call

def pin(segment, start=0, end=None):
    pinning.add(segment, start, (end or segment.size) - start)

def mapped(size):
    # Of memory that has no name: how often so much of it is mapped here.
    ranges = [line.split()[0].split("-") for line in open("/proc/self/maps") if "gpubridge" in line]
    return sum(int(end, 16) - int(start, 16) == size for start, end in ranges)

pinning = HostPinning(lambda *what: said.append(what))
pinning.begin(context)
copies = CopyStream(context)
"""


def registered(machine):
    return [call.arguments[0] for call in machine.calls("cuMemHostRegister") if not call.result]


def test_pages_are_there_before_the_driver_asks_for_them(machine):
    """It would make them under its lock."""
    machine.set(pin_us_per_mib=10, pin_us_per_mib_untouched=1_000_000)
    with device_worker(machine) as worker:
        worker.do(START)
        assert worker.do(
            f"slow(); host = Segment.create(1, {2 * MIB}); pin(host, 4096, None);"
            "begun.acquire(); answer = os.fstat(host.fd).st_blocks * 512; go.set(); pinning.close()"
        ) == (2 * MIB - 4096)
        assert machine.activity(worker.pid).held < 0.5


def test_an_old_kernel_makes_pages_without_losing_a_write(worker):
    """Others write to the memory while it is pinned."""
    assert worker.do(
        f"host = Segment.create(1, {8 * MIB}); host.view[4096] = 7; ended = []\n"
        "def write():\n"
        "    for at in range(1, len(host.view), 4096): host.view[at] = 9\n"
        "pinned_memory._madvise = lambda *_: -1\n"
        "slow(); pin(host); thread = threading.Thread(target=write); thread.start()\n"
        "begun.acquire(); thread.join(); go.set(); pinning.close()\n"
        "answer = [os.fstat(host.fd).st_blocks * 512, host.view[4096],"
        "set(host.view[1::4096]) == {9}]"
    ) == [8 * MIB, 7, True]


def test_an_old_kernel_makes_pages_that_nobody_has_written_to(worker):
    assert (
        worker.do(
            f"pinned_memory._madvise = lambda *_: -1; slow(); host = Segment.create(1, {2 * MIB});"
            "pin(host); begun.acquire(); answer = os.fstat(host.fd).st_blocks * 512;"
            "go.set(); pinning.close()"
        )
        == 2 * MIB
    )


def test_a_registration_under_way_is_not_waited_for(machine, worker):
    """The memory of one that is removed stays mapped for the driver, and no longer than that."""
    assert worker.do(
        f"""
slow()
first, second = Segment.create(1, {3 * MIB}), Segment.create(2, {5 * MIB})
pin(first)
begun.acquire()
pinning.remove(1)
first.close()
del first
pin(second)
answer = [mapped({3 * MIB}), mapped({5 * MIB})]
go.set()
begun.acquire()
pinning.remove(2)
second.close()
pinning.close()
gc.collect()
answer += [mapped({3 * MIB}), mapped({5 * MIB}), said]
"""
    ) == [1, 1, 0, 0, []]
    names = [call.name for call in machine.calls() if "MemHost" in call.name]
    assert names == ["cuMemHostRegister", "cuMemHostUnregister"] * 2


def test_memory_removed_before_its_turn_is_not_pinned(machine, worker):
    assert (
        worker.do(
            f"slow(); first, second = Segment.create(1, 4096), Segment.create(2, {MIB});"
            "pin(first); begun.acquire(); pin(second);"
            "pinning.remove(2); go.set(); pinning.close();"
            "answer = os.fstat(second.fd).st_blocks"
        )
        == 0
    )
    assert registered(machine) == [4096]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_model_copies_a_slot_itself_whatever_is_pinned_meanwhile(machine, worker, pinned):
    """The driver refuses a copy of memory that is pinned in part, or in several parts."""
    size = 65 * MIB
    machine.fail("cuMemHostRegister", OUT_OF_MEMORY, nth=1 if not pinned else 100)
    worker.do(
        f"""
slow()
host = Segment.create(1, {size}); there = mine({size})
def copied():
    with context.pushed():
        ok(d.cuMemcpyHtoDAsync(there.pointer, host.view, {size}, copies.handle))
        ok(d.cuMemcpyDtoHAsync(host.view, there.pointer, {size}, copies.handle))
    copies.wait()
host.view[-2:] = b"ab"; pin(host); begun.acquire(); copied(); go.set()
other = Segment.create(2, 8192); pin(other); begun.acquire(); copied(); pinning.close(); copied()
assert host.view[-2:] == b"ab"
"""
    )
    assert registered(machine) == [*([size] if pinned else []), 8192]
    assert len(machine.calls("cuMemHostUnregister")) == 1 + pinned
    said = worker.do("answer = said")
    assert [reason for reason, _ in said] == ([] if pinned else ["host_memory_not_pinned"])
    assert pinned or "raise the container's limit of memory" in said[0][1]


def test_a_lost_context_is_said_once_and_ends_nothing_else(machine, worker):
    machine.fail("cuMemHostRegister", 719)
    worker.do("host = Segment.create(1, 8192)")
    worker.do("slow(); go.set()")
    worker.do("pin(host, 0, 4096); pin(host, 4096, None)")
    worker.do(
        "begun.acquire(); begun.acquire(); pinning.remove(1); pinning.remove(7); pinning.close(); pinning.close()"
    )
    assert len(worker.do("answer = said")) == 1


def test_nothing_is_pinned_before_the_gpu_is_used(machine, worker):
    """Nor kept: a model that never uses its GPU gives its memory back while it is idle."""
    assert worker.do(
        "pinning.close(); pinning = HostPinning(lambda *what: said.append(what)); slow(); go.set();"
        "kept, gone = Segment.create(1, 8192), Segment.create(2, 4096)\n"
        "for each in (kept, gone): pin(each)\n"
        "pinning.remove(2); answer = [kept.pinned]; pinning.begin(context); begun.acquire();"
        "pinning.close(); answer += [kept.pinned, gone.pinned]"
    ) == [False, True, False]
    assert registered(machine) == [8192]
