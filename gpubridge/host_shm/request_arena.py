"""Arena for the requests of one model: slots in one sparse memfd.

The memfd is as large as its model could ever need, but only used pages take memory: from the first
write until they are released by punching a hole. So the pages of a free slot can be released for a
slot of any other size.
"""

from __future__ import annotations

import resource
import time
from bisect import bisect_left
from typing import Protocol

from gpubridge.dataplane import SlotLists
from gpubridge.errors import ArenaFull, BridgeError
from gpubridge.host_shm.arena import Bucket, HostArena, Slot, slots_together
from gpubridge.host_shm.budget import LARGE_BYTES, Body, Budget, piece_bytes
from gpubridge.host_shm.segment import Segment

_RESERVED = 4
"""A segment has addresses for this many times the limit, so that fragmentation does not matter."""
_PAGE = 4096
_GUARD = 1 << 20
"""Unused bytes at the start: writes before the first slot hit no other mapping of the process."""


class AddressSpace:
    """First-fit allocator of ranges from ``size`` bytes."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, size: int) -> None:
        # The free ranges, in order; no two of them touch.
        self._starts = [0]
        self._ends = [size]

    def take(self, nbytes: int) -> int | None:
        """Allocate a range; return its start, or None if no free range is large enough."""
        starts, ends = self._starts, self._ends
        for i, start in enumerate(starts):
            if ends[i] - start >= nbytes:
                if ends[i] - start == nbytes:
                    del starts[i], ends[i]
                else:
                    starts[i] = start + nbytes
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a range, and join it with its free neighbours."""
        starts, ends = self._starts, self._ends
        end = start + nbytes
        i = bisect_left(starts, start)
        after = i < len(starts) and starts[i] == end
        before = i > 0 and ends[i - 1] == start
        if before and after:
            ends[i - 1] = ends[i]
            del starts[i], ends[i]
        elif before:
            ends[i - 1] = end
        elif after:
            starts[i] = start
        else:
            starts.insert(i, start)
            ends.insert(i, end)


class ArenaEvents(Protocol):
    """Callbacks of an arena about its segments."""

    def created(self, arena: RequestArena, size: int) -> Segment:
        """Create the arena's next segment; raises BridgeError: UNAVAILABLE."""

    def dropped(self, segment: Segment) -> None:
        """A segment is about to be closed."""

    def retired(self, segment: Segment) -> None:
        """A pinned segment must be unpinned; its free slots are not used again."""

    def extended(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Another range of a segment is in use that processes have pinned: they may pin it, too."""


def _longest_file() -> int:
    """Return the bytes that a file of this process may have (``ulimit -f``), in whole pages."""
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return 1 << 62 if longest == resource.RLIM_INFINITY else longest // _PAGE * _PAGE


def reserved_bytes(limit: int) -> int:
    """Return the bytes of a segment's addresses."""
    return _GUARD + (-(-_RESERVED * limit // _PAGE) + _RESERVED) * _PAGE


class _Space:
    """A segment and its buckets of slots."""

    __slots__ = ("addresses", "buckets", "pinned", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.addresses = AddressSpace(segment.size)
        self.addresses.take(_GUARD)
        self.buckets: dict[int, _SparseBucket] = {}
        # Whether other processes pin its used ranges, so that no holes may be punched.
        self.pinned = False

    @property
    def idle(self) -> bool:
        """Return whether no slot is allocated."""
        return all(bucket.free == bucket.slots for bucket in self.buckets.values())


class _SparseBucket(Bucket):
    """Slots of one size in a range of a space; each `Slot` is made when first needed.

    - ``unmade``: offsets of slots without a `Slot`, the next one last.
    - ``touched``: bytes of its slots that may be in memory.
    - ``pinned``: whether processes may have pinned it, so that all of it counts as in memory.
    """

    __slots__ = ("offset", "pinned", "space", "touched", "unmade")

    def __init__(
        self, space: _Space, offset: int, size: int, count: int, stack: list[Slot]
    ) -> None:
        super().__init__(space.segment, size, count, stack)
        self.space = space
        self.offset = offset
        self.unmade = [offset + i * size for i in reversed(range(count))]
        self.touched = 0
        self.pinned = False


class RequestArena(SlotLists, HostArena):  # type: ignore[misc]  # all its slots have one home
    """Arena whose slots lie in one sparse segment; used by one thread at a time.

    Compiled code (`SlotLists`) allocates and frees small slots without calling Python.

    - ``budget``: the budget of all such arenas.
    - ``home``: the `Segment.home` of its memory: the model of the requests.
    - ``events``: creates its segments, and gets notified about them.
    """

    def __init__(self, budget: Budget, home: str, events: ArenaEvents) -> None:
        HostArena.__init__(self, 0, budget.limit)
        self.home = home
        self.budget = budget
        self._events = events
        # Bytes of a segment's addresses.
        self._wanted = min(reserved_bytes(budget.limit), _longest_file())
        self._space: _Space | None = None
        # Replaced pinned spaces that still have allocated slots.
        self._retired: list[_Space] = []
        SlotLists.__init__(self, self._stacks, self._retired)
        # Slots of bodies that are arriving.
        self._arriving: dict[Slot, None] = {}
        # Buckets with unmade slots, by size.
        self._unmade: dict[int, list[_SparseBucket]] = {}
        budget.add(self)

    def allocate_new(self, nbytes: int) -> Slot:
        """Allocate a slot that is used completely, and count its memory; as `HostArena.allocate`."""
        if nbytes > LARGE_BYTES:
            self.budget.check(nbytes)
        for last in (False, True):
            slot = HostArena.allocate(self, nbytes)
            if slot.touched == slot.size:
                break
            try:
                self._touch(slot, slot.size)
                break
            except BridgeError:
                # Freeing it may close its segment, a replaced pinned one: then try again.
                used = self.budget.used
                self.free(slot)
                if last or self.budget.used == used:
                    raise
        self._pin_used(slot)
        return slot

    def reserve(self, nbytes: int, body: Body) -> Slot:
        """Allocate a slot for an arriving body, whose memory is counted piecewise by `grow`.

        Raises BridgeError: UNAVAILABLE, having released the body, if it can never fit.
        """
        try:
            self.budget.check(nbytes)
            slot = HostArena.allocate(self, nbytes)
        except BridgeError:
            body.release()
            raise
        slot.body = body
        body.promise(slot.size)
        self._arriving[slot] = None
        return slot

    def grow(self, slot: Slot, at: int, end: int) -> int:
        """Count memory for the next bytes of a slot's body; return its end in the slot.

        ``at``, ``end``: offset of the next byte in the slot, and the end of the body.

        Raises BridgeError: UNAVAILABLE if memory is short; the slot stays allocated.
        """
        assert slot.body is not None
        upto = at + piece_bytes(at, end - at)
        slot.body.charge(upto)
        if upto > slot.touched:
            self._touch(slot, min(-(-upto // _PAGE) * _PAGE, slot.size))
        return upto

    def complete(self, slot: Slot) -> None:
        """Note that the body has arrived, so that it can no longer be refused."""
        if slot.body is not None:
            slot.body.complete()
            self._arriving.pop(slot, None)
            self._pin_used(slot)

    def _touch(self, slot: Slot, nbytes: int) -> None:
        """Count the first ``nbytes`` of a slot as used."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if not bucket.pinned:
            more = nbytes - slot.touched
            self.budget.take(more, large=slot.size > LARGE_BYTES, body=slot.body)
            bucket.touched += more
            self.capacity += more
        slot.touched = nbytes

    def segments(self) -> list[Segment]:
        """Return all segments: more than one while pinned memory is being replaced."""
        return [space.segment for space in self._spaces()]

    def pin(self, region: int) -> list[tuple[int, int]]:
        """Note that processes pin a segment; return its used ranges, to be pinned."""
        space = self._space_of(region)
        if space is None or space is not self._space:
            return []
        if not space.pinned:
            space.pinned = True
            arriving = {slot.bucket for slot in self._arriving}
            for bucket in space.buckets.values():
                if bucket.touched and bucket not in arriving:
                    self._pin(bucket)
        return [
            (bucket.offset, bucket.slots * bucket.slot_size)
            for bucket in space.buckets.values()
            if bucket.pinned
        ]

    def unpin(self, region: int) -> None:
        """Note that no process pins a segment any more."""
        space = self._space_of(region)
        if space is None:
            return
        space.pinned = False
        for bucket in space.buckets.values():
            if bucket.pinned:
                bucket.pinned = False
                for offset in bucket.unmade:
                    if space.segment.punch(offset, bucket.slot_size):
                        bucket.touched -= bucket.slot_size
                        self._uncount(bucket.slot_size)

    def _space_of(self, region: int) -> _Space | None:
        return next((each for each in self._spaces() if each.segment.region == region), None)

    def _pin_used(self, slot: Slot) -> None:
        """Have processes pin the bucket of a slot once its body has arrived, since pinning takes memory."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if bucket.space.pinned and not bucket.pinned:
            self._pin(bucket)
            if bucket.pinned:
                nbytes = bucket.slots * bucket.slot_size
                self._events.extended(bucket.segment, bucket.offset, nbytes)

    def _pin(self, bucket: _SparseBucket) -> None:
        """Count all of a bucket as used, to be pinned, if that takes no memory from others."""
        rest = bucket.slots * bucket.slot_size - bucket.touched
        if self.budget.fits(rest):
            self.budget.take(rest, large=True)
            bucket.touched += rest
            self.capacity += rest
            bucket.pinned = True

    def lent(self) -> tuple[int, int]:
        """Return the number of allocated slots, and their bytes."""
        buckets = [bucket for space in self._spaces() for bucket in space.buckets.values()]
        used = [(bucket.slots - bucket.free, bucket.slot_size) for bucket in buckets]
        return sum(n for n, _ in used), sum(n * size for n, size in used)

    def trim(self, idle_seconds: float) -> int:
        """Release the memory that was unused for ``idle_seconds``; return its bytes.

        Pinned memory stays: pinning and unpinning delay all work of a GPU.
        """
        before = self.capacity
        oldest = time.monotonic() - idle_seconds
        for space in self._spaces():
            if space.pinned:
                continue
            buckets = list(space.buckets.values())
            idle = [b for b in buckets if b.free == b.slots and b.idle_since <= oldest]
            if len(idle) == len(buckets):
                self._close(space)
            else:
                for bucket in idle:
                    self._give_back(bucket)
        return before - self.capacity

    def reclaim(self) -> None:
        """Release all memory that is not allocated or not filled yet, as far as possible."""
        for space in self._spaces():
            if space.pinned and space.idle:
                self._close(space)
                continue
            if space.pinned:
                self._retire(space)
            else:
                self._punch(space)

    def take_back(self, slot: Slot) -> None:
        """Free a slot that is charged to a body, or while pinned memory is being replaced."""
        body, slot.body = slot.body, None
        if body is not None:
            body.release()
            self._arriving.pop(slot, None)
        HostArena.free(self, slot)
        if self._retired:
            bucket = slot.bucket
            assert isinstance(bucket, _SparseBucket)
            if bucket.space is not self._space:
                self._unmake(slot, bucket.space)
                self._forget(bucket)
                if bucket.space.idle:
                    self._close(bucket.space)
                elif bucket.free == bucket.slots:
                    self._give_back(bucket)

    def close(self) -> None:
        """Close all segments, even if slots are allocated."""
        for space in self._spaces():
            self._close(space)

    def _spaces(self) -> list[_Space]:
        # A copy, since callers close spaces while they iterate.
        return [*self._retired] if self._space is None else [*self._retired, self._space]

    # -- growing -------------------------------------------------------------------------------

    def _grow(self, size: int, _: str) -> list[Slot]:
        """Make another slot; returns its stack."""
        bucket = self._bucket(size)
        slot = Slot(bucket, bucket.unmade.pop(), size)
        if not bucket.unmade:
            self._unmade[size].remove(bucket)
        bucket.stack.append(slot)
        return bucket.stack

    def _bucket(self, size: int) -> _SparseBucket:
        """Return a bucket with an unmade slot."""
        known = self._unmade.setdefault(size, [])
        if known:
            return known[-1]
        count = slots_together(size)
        space = self._space
        if space is not None and space.segment.size < self._wanted and space.idle:
            # Made when addresses were short.
            self._close(space)
            space = None
        if space is None:
            space = self._space = self._reserved(_GUARD + count * size)
        offset = self._take_addresses(space, count * size)
        bucket = _SparseBucket(space, offset, size, count, self._stacks.setdefault(size, []))
        space.buckets[offset] = bucket
        known.append(bucket)
        return bucket

    def _reserved(self, least: int) -> _Space:
        """Make a space, with fewer addresses where a limit of this process (``ulimit -v``) leaves no more."""
        size = max(self._wanted, least)
        while True:
            try:
                return _Space(self._events.created(self, size))
            except BridgeError:
                if size <= least:
                    raise
                # A part of what is left stays for others.
                size = max(size // 4 // _PAGE * _PAGE, least)

    def _take_addresses(self, space: _Space, nbytes: int) -> int:
        """Return the start of free addresses.

        A body has addresses for all that its client promises. Without free ones, those of the
        connection that was promised most go, its newest body first.
        """
        offset = space.addresses.take(nbytes)
        if offset is None and not space.pinned:
            self._punch(space)
            offset = space.addresses.take(nbytes)
        error = ArenaFull(
            f"no {nbytes} bytes of free addresses are left for the requests of model "
            f"'{self.home}': send fewer at once, or raise the limit "
            f"({'--request-arena-limit' if self._is_whole(space) else 'ulimit -v, -f'})"
        )
        while offset is None:
            arriving = (slot.body for slot in reversed(self._arriving))
            bodies = [body for body in arriving if body in self.budget.arriving]
            if not bodies or space is not self._space:
                raise error
            max(bodies, key=lambda body: body.promised).refuse(error)
            if not space.pinned:
                self._punch(space)
            offset = space.addresses.take(nbytes)
        return offset

    def _is_whole(self, space: _Space) -> bool:
        return space.segment.size >= reserved_bytes(self.budget.limit)

    # -- releasing -----------------------------------------------------------------------------

    def _retire(self, space: _Space) -> None:
        """Replace a pinned segment: its free slots are not used again, and it is unpinned."""
        self.unpin(space.segment.region)
        self._punch(space)
        for bucket in space.buckets.values():
            self._forget(bucket)
        self._retired.append(space)
        self._space = None
        self._events.retired(space.segment)

    def _punch(self, space: _Space) -> None:
        """Release the pages of all free slots of a space."""
        for bucket in list(space.buckets.values()):
            if bucket.free == bucket.slots:
                self._give_back(bucket)
        for stack in self._stacks.values():
            stack[:] = [slot for slot in stack if not self._unmake(slot, space)]
        for slot in self._arriving:
            self._punch_unfilled(slot, space)

    def _punch_unfilled(self, slot: Slot, space: _Space) -> None:
        """Release the pages of an arriving body's slot that it has not filled yet."""
        bucket, body = slot.bucket, slot.body
        assert isinstance(bucket, _SparseBucket)
        assert body is not None
        used = -(-body.held // _PAGE) * _PAGE
        rest = slot.touched - used
        if bucket.space is space and rest > 0 and slot.segment.punch(slot.offset + used, rest):
            slot.touched = used
            bucket.touched -= rest
            self._uncount(rest)

    def _unmake(self, slot: Slot, space: _Space) -> bool:
        """Release the pages of a free slot in a space; return whether it was in it."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if bucket.space is not space or not space.segment.punch(slot.offset, slot.size):
            return False
        if not bucket.unmade:
            self._unmade[bucket.slot_size].append(bucket)
        bucket.unmade.append(slot.offset)
        bucket.touched -= slot.touched
        self._uncount(slot.touched)
        return True

    def _give_back(self, bucket: _SparseBucket) -> None:
        """Release the memory of a bucket without allocated slots."""
        nbytes = bucket.slots * bucket.slot_size
        if not bucket.segment.punch(bucket.offset, nbytes):
            return
        self._forget(bucket)
        self._uncount(bucket.touched)
        del bucket.space.buckets[bucket.offset]
        bucket.space.addresses.give_back(bucket.offset, nbytes)

    def _close(self, space: _Space) -> None:
        """Close a whole segment."""
        if space is self._space:
            self._space = None
        else:
            self._retired.remove(space)
        for bucket in space.buckets.values():
            self._forget(bucket)
            self._uncount(bucket.touched)
        self._events.dropped(space.segment)
        space.segment.close()

    def _forget(self, bucket: _SparseBucket) -> None:
        """Remove all slots of a bucket from the free and unmade ones."""
        stack = bucket.stack
        stack[:] = [slot for slot in stack if slot.bucket is not bucket]
        unmade = self._unmade[bucket.slot_size]
        if bucket in unmade:
            unmade.remove(bucket)

    def _uncount(self, nbytes: int) -> None:
        self.capacity -= nbytes
        self.budget.give_back(nbytes)
