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


def test_memory_is_pinned_in_pieces_of_at_most_64_mib(machine, worker):
    worker.do(
        f"slow(); go.set(); host = Segment.create(1, {150 * MIB}); pin(host)\n"
        "for _ in range(3): begun.acquire()\n"
        "pinning.close()"
    )
    assert registered(machine) == [64 * MIB, 64 * MIB, 22 * MIB]
    assert len(machine.calls("cuMemHostUnregister")) == 3


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


def test_a_copy_is_made_in_the_pieces_that_are_pinned(machine, worker):
    """The driver refuses one of memory that is partly pinned, as it is on the way."""
    size = 5 * MIB // 2
    worker.do(
        f"""
pinned_memory.PIECE_BYTES = {MIB}
slow()
host, back = Segment.create(1, {size}), Segment.create(2, {size})
pin(host)
begun.acquire()
host.view[:] = bytes(range(250)) * ({size} // 250) + bytes({size % 250})
there = mine({size})
copies.h2d(there.pointer, host.view, {size})
copies.wait()
go.set()
begun.acquire(); begun.acquire()
pin(back)
begun.acquire()
copies.h2d(there.pointer, host.view[10:-10], {size - 20})
"""
    )
    sizes = [call.arguments[0] for call in machine.calls("cuMemcpyHtoDAsync")]
    assert sizes == [MIB, MIB, MIB // 2, MIB - 10, MIB, MIB // 2 - 10]
    assert worker.do("answer = [copies.counts.copies['h2d'], copies.counts.copied['h2d']]") == [
        2,
        2 * size - 20,
    ]
    assert worker.do(
        f"pinning.close(); copies.d2h(back.view, there.pointer, {size}); copies.wait();"
        "answer = back.view[100:-100] == host.view[110:-90]"
    )
    # Nothing is pinned any more: it is one copy again.
    worker.do(f"copies.d2h(back.view, there.pointer, {size}); copies.wait()")
    assert machine.calls("cuMemcpyDtoHAsync")[-1].arguments[0] == size


def test_a_range_is_pinned_as_a_whole_or_not_at_all(machine, worker):
    machine.fail("cuMemHostRegister", OUT_OF_MEMORY, nth=3)
    worker.do(f"pinned_memory.PIECE_BYTES = {MIB}; host = Segment.create(1, {4 * MIB})")
    worker.do("slow(); go.set(); pin(host); other = Segment.create(2, 8192)")
    worker.do("pin(other)\nfor _ in range(4): begun.acquire()\npinning.close()")
    assert registered(machine) == [MIB, MIB, 8192]
    assert len(machine.calls("cuMemHostUnregister")) == 3
    ((reason, text),) = worker.do("answer = said")
    assert reason == "host_memory_not_pinned"
    assert "raise the container's limit of memory" in text


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
