"""Slots of a device arena never overlap, are aligned, and are all there again when given back."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from gpubridge.cuda_ipc import DeviceArena
from gpubridge.errors import BridgeError, ErrorCode, InternalError

SIZE = 64 * 256
BASE = 0x7F0000000000


def arena():
    return DeviceArena(SimpleNamespace(region=3, pointer=BASE, size=SIZE))


def test_slots_say_where_they_lie():
    lent = arena()
    first, second = lent.allocate(1), lent.allocate(257)
    assert (first.offset, first.size, first.pointer) == (0, 256, BASE)
    assert (second.offset, second.size, second.pointer) == (256, 512, BASE + 256)
    assert second.segment is lent.segment
    assert lent.lent() == (2, 768)


def test_a_tensor_of_no_bytes_has_a_place():
    assert arena().allocate(0).size == 256


def test_a_full_arena_says_how_full():
    lent = arena()
    slots = [lent.allocate(256) for _ in range(64)]
    for slot in slots[::2]:
        lent.free(slot)
    with pytest.raises(
        BridgeError, match=r"512 bytes asked for, 8192 of 16384.*largest.* 256;"
    ) as e:
        lent.allocate(512)
    assert e.value.code == ErrorCode.UNAVAILABLE
    lent.free(slots[1])
    assert lent.allocate(512).offset == 0


def test_an_allocation_above_the_limit_says_so():
    with pytest.raises(BridgeError, match=r"of 16384 bytes is too small.*device-arena-bytes"):
        arena().allocate(SIZE + 1)


def test_a_slot_goes_back_once_and_to_its_own_arena():
    lent, other = arena(), arena()
    slot = lent.allocate(1)
    with pytest.raises(InternalError, match="not lent"):
        other.free(slot)
    lent.free(slot)
    with pytest.raises(InternalError, match="not lent"):
        lent.free(slot)
    assert lent.lent() == (0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, SIZE // 2)), max_size=80))
def test_slots_never_overlap(steps):
    lent, out = arena(), []
    for give_back, number in steps:
        if give_back and out:
            lent.free(out.pop(number % len(out)))
            continue
        try:
            slot = lent.allocate(number)
        except BridgeError:
            continue
        assert slot.offset % 256 == 0
        assert slot.size >= number
        assert slot.offset + slot.size <= SIZE
        assert all(
            slot.offset + slot.size <= other.offset or other.offset + other.size <= slot.offset
            for other in out
        )
        out.append(slot)
        assert lent.lent() == (len(out), sum(slot.size for slot in out))
    for slot in out:
        lent.free(slot)
    assert lent.allocate(SIZE).size == SIZE


def test_threads_may_free_what_others_allocate():
    lent = arena()

    def work():
        for _ in range(500):
            slot = lent.allocate(200)
            lent.free(slot)

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(work) for _ in range(4)]:
            each.result()
    assert lent.lent() == (0, 0)
    assert lent.allocate(SIZE).offset == 0
