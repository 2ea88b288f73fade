"""A model's arena of requests: one segment, slots that never overlap, pages that come and go."""

import itertools
import os
import resource
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import LARGE_BYTES, Account, Body, Budget, Segment
from gpubridge.host_shm.arena import slot_size
from gpubridge.host_shm.request_arena import AddressSpace, RequestArena, reserved_bytes

LIMIT = 8 << 20
LARGE_LIMIT = LIMIT - LIMIT // 10
SIZES = st.one_of(
    st.integers(1, 70_000), st.sampled_from([4096, 4097, 65_536, 65_537, 1 << 20, 3 << 20])
)


class Events:
    """Makes segments, and notes what it hears; pins what it is told to, so that it takes memory."""

    def __init__(self, memory):
        self.memory = memory
        self.numbers = itertools.count(1)
        self.living = set()
        self.pinned = Counter()
        self.most = reserved_bytes(memory.limit)

    def created(self, arena, size):
        if size > self.most:
            raise BridgeError("no addresses", ErrorCode.UNAVAILABLE)
        segment = Segment.create(next(self.numbers), size, arena.home)
        self.living.add(segment.region)
        return segment

    def dropped(self, segment):
        self.living.remove(segment.region)

    def retired(self, segment):
        for known in [known for known in self.pinned if known[0] == segment.region]:
            del self.pinned[known]

    def extended(self, segment, offset, nbytes):
        assert self.pinned[segment.region, offset] == 0
        self.pin(segment, offset, nbytes)

    def pin(self, segment, offset, nbytes):
        self.pinned[segment.region, offset] = nbytes
        # Reading makes pages of shared memory, as pinning does.
        assert bytes(segment.view[offset : offset + nbytes : 4096])


def test_an_arena_does_with_the_addresses_that_there_are():
    _, events, arena = new_arena()
    events.most = 6 << 20
    kept, large = arena.allocate(4096), 3 << 20
    with pytest.raises(BridgeError, match=r"addresses are left .* or raise the limit .ulimit -v"):
        arena.allocate(large)
    events.most = 4 * LIMIT + (2 << 20)
    # As long as slots are in use it stays as it is.
    with pytest.raises(BridgeError, match="addresses are left"):
        arena.allocate(large)
    arena.free(kept)
    arena.free(arena.allocate(large))
    events.most = 1 << 20
    arena.close()
    with pytest.raises(BridgeError, match="no addresses"):
        arena.allocate(4096)


def test_an_arena_is_no_longer_than_a_file_may_be(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: ((6 << 20) + 1, 8 << 20))
    _, _, arena = new_arena()
    small = arena.allocate(4096)
    assert small.segment.size == 6 << 20
    with pytest.raises(BridgeError, match=r"or raise the limit .ulimit -v, -f.$"):
        arena.allocate(6 << 20)
    # One is made no more often for that.
    arena.free(small)
    assert arena.allocate(1 << 20).segment is small.segment
    arena.close()


def new_arena(limit=LIMIT):
    memory = Budget(limit)
    events = Events(memory)
    return memory, events, RequestArena(memory, "m", events)


def resident(segment):
    """Bytes of a segment that take memory."""
    return os.fstat(segment.fd).st_blocks * 512


class ArenasMachine(RuleBasedStateMachine):
    """Two arenas under one limit; every lent slot keeps a pattern of its own."""

    slots = Bundle("slots")

    def __init__(self):
        super().__init__()
        self.memory = Budget(LIMIT)
        self.events = Events(self.memory)
        self.arenas = [RequestArena(self.memory, name, self.events) for name in "ab"]
        self.lent = {}
        self.count = 0

    @rule(target=slots, which=st.integers(0, 1), nbytes=SIZES)
    def allocate(self, which, nbytes):
        lent = sum(slot.size for slot, _, _ in self.lent.values())
        try:
            slot = self.arenas[which].allocate(nbytes)
        except BridgeError:
            # Unused memory is given back for it, pinned or not.
            most = LIMIT if slot_size(nbytes) <= LARGE_BYTES else LARGE_LIMIT
            assert lent + slot_size(nbytes) > most
            return None
        assert nbytes <= slot.size == len(slot.memory)
        assert slot.offset % 4096 == 0
        assert slot.segment.home == "ab"[which]
        self.count += 1
        mark = self.count % 251 + 1
        slot.memory[:] = bytes([mark]) * slot.size
        self.lent[id(slot)] = slot, mark, which
        return slot

    @rule(slot=consumes(slots))
    def free(self, slot):
        if slot is not None:
            _, _, which = self.lent.pop(id(slot))
            self.arenas[which].free(slot)

    def pinned(self, which):
        regions = {segment.region for segment in self.arenas[which].segments()}
        return any(region in regions for region, _ in self.events.pinned)

    @rule(which=st.integers(0, 1))
    def trim(self, which):
        arena = self.arenas[which]
        before = arena.capacity
        assert arena.trim(0.0) == before - arena.capacity
        if not arena.lent()[0] and not self.pinned(which):
            assert arena.segments() == []

    @rule(which=st.integers(0, 1))
    def pin(self, which):
        for segment in self.arenas[which].segments():
            self.events.pinned[segment.region, -1] += 1
            for offset, nbytes in self.arenas[which].pin(segment.region):
                self.events.pin(segment, offset, nbytes)

    @rule(which=st.integers(0, 1))
    def unpin(self, which):
        for segment in self.arenas[which].segments():
            self.arenas[which].unpin(segment.region)
            for known in [known for known in self.events.pinned if known[0] == segment.region]:
                del self.events.pinned[known]

    @rule()
    def trim_what_is_old(self):
        assert all(arena.trim(1000.0) == 0 for arena in self.arenas)

    @invariant()
    def nothing_overlaps(self):
        for slot, mark, _ in self.lent.values():
            assert slot.memory[0] == slot.memory[-1] == mark
            start = slot.offset
            assert bytes(slot.segment.view[start : start + 1]) == bytes([mark])

    @invariant()
    def the_books_are_right(self):
        assert self.memory.used == sum(arena.capacity for arena in self.arenas) <= LIMIT
        segments = [each for arena in self.arenas for each in arena.segments()]
        assert {each.region for each in segments} == self.events.living
        assert sum(map(resident, segments)) <= self.memory.used
        for which, arena in enumerate(self.arenas):
            sizes = [slot.size for slot, _, owner in self.lent.values() if owner == which]
            assert arena.lent() == (len(sizes), sum(sizes))

    def teardown(self):
        self.lent.clear()
        for arena in self.arenas:
            arena.close()
        assert not self.events.living
        assert self.memory.used == 0


TestArenas = ArenasMachine.TestCase
TestArenas.settings = settings(stateful_step_count=50)


def test_a_model_has_one_segment_whatever_the_sizes():
    _, _, arena = new_arena()
    slots = [arena.allocate(size) for size in (1, 5000, 100_000, 1 << 20)]
    assert {slot.segment.region for slot in slots} == {1}
    assert len(arena.segments()) == 1
    arena.close()


def test_pages_are_there_when_they_are_written_to():
    _, _, arena = new_arena()
    slot = arena.allocate(4 << 20)
    assert resident(slot.segment) == 0
    slot.memory[: 1 << 20] = bytes(1 << 20)
    assert resident(slot.segment) == 1 << 20
    arena.close()


def test_full_it_says_so_and_recovers():
    _, _, arena = new_arena()
    slot = arena.allocate(6 << 20)
    expected = f"arena is full: {2 << 20} bytes asked for, {6 << 20} of {LIMIT}"
    with pytest.raises(BridgeError, match=expected) as caught:
        arena.allocate(2 << 20)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    # A part is kept for small ones.
    small = [arena.allocate(1) for _ in range((2 << 20) // 4096)]
    with pytest.raises(BridgeError, match="arena is full"):
        arena.allocate(1)
    arena.free(slot)
    assert arena.allocate(2 << 20).size == 2 << 20
    assert small
    arena.close()


def test_a_size_beyond_the_limit_is_refused_with_both_numbers():
    memory, _, arena = new_arena()
    expected = f"of {9 << 20} bytes is too large: .* {LARGE_LIMIT} of the {LIMIT} bytes"
    with pytest.raises(BridgeError, match=expected):
        arena.allocate(9 << 20)
    assert memory.used == 0
    arena.close()


def test_the_slot_used_last_is_used_next():
    _, _, arena = new_arena()
    slots = [arena.allocate(100) for _ in range(3)]
    arena.free(slots[1])
    assert arena.allocate(100) is slots[1]
    arena.close()


def test_pinned_pages_stay_until_their_segment_goes():
    memory, events, arena = new_arena()
    kept = arena.allocate(100)
    kept.memory[:] = b"k" * kept.size
    first = arena.allocate(4 << 20)
    first.memory[:] = b"f" * first.size
    assert arena.pin(kept.segment.region) == [(1 << 20, 1 << 20), (2 << 20, 4 << 20)]
    # What is used from now on is to be pinned, too.
    arena.free(arena.allocate(1 << 20))
    assert events.pinned == {(1, 6 << 20): 1 << 20}
    arena.free(first)
    assert arena.trim(0.0) == 0
    assert resident(kept.segment) == (5 << 20) + 4096
    # Without space, all of it is unpinned, and nothing lent again; another segment takes its place.
    assert arena.allocate(6 << 20).segment is kept.segment
    assert events.pinned == {}
    assert resident(kept.segment) == 4096
    assert memory.used == (6 << 20) + 4096
    assert arena.pin(kept.segment.region) == []
    assert arena.allocate(100).segment.region == 2
    assert kept.memory[0] == ord("k")
    arena.free(kept)
    assert memory.used == (6 << 20) + 4096
    arena.close()


def test_all_replaced_segments_are_closed():
    _, events, arena = new_arena()
    for _ in range(2):
        arena.pin(arena.allocate(100).segment.region)
        arena.reclaim()
    assert len(events.living) == 2
    arena.close()
    assert not events.living


def test_a_long_request_in_pinned_memory_does_not_starve_other_models():
    memory, events, arena = new_arena()
    other = RequestArena(memory, "other", events)
    long = arena.allocate(100)
    also = arena.allocate(1 << 20)
    arena.pin(long.segment.region)
    for slot in [arena.allocate(1 << 20) for _ in range(5)]:
        arena.free(slot)
    other.free(other.allocate(5 << 20))
    assert resident(long.segment) == 0
    arena.free(also)
    other.free(other.allocate(6 << 20))
    assert len(events.living) == 2
    # It was the last of it.
    arena.free(long)
    assert len(events.living) == 1
    arena.close()
    other.close()


def test_pinned_memory_is_charged_and_stays_while_idle():
    memory, events, arena = new_arena()
    slot = arena.allocate(100)
    assert memory.used == 4096
    assert arena.pin(slot.segment.region) == [(1 << 20, 1 << 20)]
    assert memory.used == 1 << 20
    # Further slots of it cost nothing more.
    more = [arena.allocate(100) for _ in range(10)]
    assert memory.used == 1 << 20
    for each in (slot, *more):
        arena.free(each)
    assert arena.trim(0.0) == 0
    # The stub that had it pinned is gone: what no slot was ever made of goes back at once.
    arena.unpin(slot.segment.region)
    assert memory.used == 11 * 4096
    arena.trim(0.0)
    assert (memory.used, events.living) == (0, set())


def test_a_body_that_arrives_is_not_pinned_before_it_is_there():
    """Pinning takes all of the memory, of which a client that promises much may never send the rest."""
    memory, events, arena = new_arena()
    slot = arena.reserve(5 << 20, Body(memory, Account(int), lambda _: None))
    granted = arena.grow(slot, 0, 5 << 20)
    small = arena.allocate(100)
    before = 1 << 20
    assert arena.pin(slot.segment.region) == [(small.offset, before)]
    assert memory.used == before + granted < 2 << 20
    assert events.pinned == {}
    assert arena.grow(slot, (5 << 20) - 1, 5 << 20) == 5 << 20
    arena.complete(slot)
    assert events.pinned == {(1, slot.offset): slot.size}
    assert memory.used == before + slot.size
    # The next one in its place costs nothing.
    arena.free(slot)
    again = arena.reserve((5 << 20) - 5000, Body(memory, Account(int), lambda _: None))
    assert again is slot
    arena.grow(again, 0, (5 << 20) - 5000)
    assert memory.used == before + slot.size
    arena.free(again)
    arena.close()


def test_nothing_goes_for_the_sake_of_pinning():
    memory, events, arena = new_arena()
    small = arena.allocate(100)
    other = RequestArena(memory, "other", events)
    idle = other.allocate(7 << 20)
    other.free(idle)
    assert arena.pin(small.segment.region) == []
    assert memory.used == (7 << 20) + 4096
    arena.close()
    other.close()


def test_idle_memory_goes_back_with_its_descriptor():
    memory, events, arena = new_arena()
    slot = arena.allocate(100)
    arena.free(slot)
    assert arena.trim(1000.0) == 0
    assert arena.trim(0.0) == 4096
    assert (memory.used, events.living, arena.segments()) == (0, set(), [])
    # Another segment comes, by another id.
    assert arena.allocate(100).segment.region == 2
    arena.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_addresses_are_lent_once_and_joined_again(steps):
    space = AddressSpace(40)
    lent = []
    for take, number in steps:
        if take:
            free = set(range(40)) - {i for at, size in lent for i in range(at, at + size)}
            at = space.take(number)
            fits = [i for i in free if all(i + j in free for j in range(number))]
            # The lowest place where it fits, as if there were no books.
            assert at == min(fits, default=None)
            if at is not None:
                lent.append((at, number))
        elif lent:
            space.give_back(*lent.pop(number % len(lent)))
    for at, size in lent:
        space.give_back(at, size)
    assert space.take(40) == 0
