"""Output memory that models write to: when it comes back."""

import gc

import numpy as np
import pytest

from gpubridge.errors import BridgeError
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.transport.control import NO_LEASE

pytestmark = pytest.mark.both_runtimes

SIZE = 1 << 20
LEASES = 8


@pytest.fixture
def table():
    return memoryview(bytearray(LEASES))


@pytest.fixture
def outputs(table):
    # A tenth is for small outputs.
    return OutputMemory(1, 9 * SIZE // 2, table, lambda segment: None, lambda segment: None)


def fill(outputs):
    """Take slots until there are none; returns how many there were."""
    taken = []
    while True:
        try:
            taken.append(outputs.allocate_for_model(SIZE)[1])
        except BridgeError:
            return len(taken)


def test_a_slot_that_is_dropped_comes_back(outputs):
    count = fill(outputs)
    assert count == 4
    gc.collect()
    assert fill(outputs) == count


def test_any_array_of_a_slot_keeps_it(outputs):
    slot, memory = outputs.allocate_for_model(SIZE)
    view = memory.view(np.float32).reshape(-1, 4)[3:5].T
    del memory
    assert fill(outputs) == 3
    other = memoryview(view)
    del view
    assert fill(outputs) == 3
    del other, slot
    assert fill(outputs) == 4


def test_a_slot_that_was_sent_comes_back_when_both_are_done(outputs, table):
    for first in ("server", "model"):
        slot, memory = outputs.allocate_for_model(SIZE)
        region, offset, nbytes, lease = outputs.send(slot, SIZE)
        assert (region, offset, nbytes) == (slot.segment.region, slot.offset, SIZE)
        assert table[lease] == 1
        if first == "server":
            table[lease] = 0
            outputs.trim(1000)
            assert fill(outputs) == 3
            del memory
        else:
            del memory
            assert fill(outputs) == 3
            table[lease] = 0
        outputs.trim(1000)
        assert fill(outputs) == 4


def test_a_slot_is_sent_once_at_a_time(outputs, table):
    slot, memory = outputs.allocate_for_model(SIZE)
    lease = outputs.send(slot, SIZE)[3]
    assert outputs.send(slot, SIZE) is None
    table[lease] = 0
    outputs.trim(1000)
    assert outputs.send(slot, SIZE) is not None
    assert memory.nbytes == SIZE


def test_without_a_lease_it_is_not_sent(outputs):
    slots = [outputs.allocate_for_model(64) for _ in range(LEASES + 1)]
    leases = [outputs.send(slot, 64) for slot, _ in slots]
    assert leases[-1] is None
    assert None not in leases[:-1]


def test_no_bytes_are_no_slot(outputs):
    slot, memory = outputs.allocate_for_model(0)
    assert memory.size == 0
    assert outputs.send(slot, 0) is None
    assert outputs.place([memory]) == [0, 0, 0, NO_LEASE]


@pytest.mark.parametrize("start", [0, 1, 63])
@pytest.mark.parametrize("nbytes", [(1 << 18) + 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 77])
def test_large_copies_arrive_whole_and_nowhere_else(outputs, nbytes, start):
    payload = np.arange(nbytes + 5, dtype=np.uint32).astype(np.uint8)[5:]
    there = np.zeros(start + nbytes + 100, np.uint8)
    outputs.copy(memoryview(there)[start : start + nbytes], payload)
    assert (there[start : start + nbytes] == payload).all()
    assert not there[:start].any()
    assert not there[start + nbytes :].any()
    assert outputs.take_copied() == nbytes


def test_slots_that_the_server_is_done_with_are_used_again_though_no_batch_ends():
    table = memoryview(bytearray(2048))
    made = []
    outputs = OutputMemory(1, 1 << 24, table, made.append, made.append)
    for _ in range(1000):
        _, lease = outputs.lend(4096)
        table[lease] = 0
    assert len(made) == 1
