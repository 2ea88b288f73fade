"""The memory that the requests of one model arrive in: slots cut from one sparse memfd.

The memfd is as large as its model could ever need, and costs what is used of it: a page is there from
the first byte that is written to it until it is given back by a hole. So sizes do not starve each
other: the pages of a free slot of one size make room for a slot of any other.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Protocol

from gpubridge.dataplane import SlotLists
from gpubridge.errors import BridgeError, unavailable
from gpubridge.host_shm.arena import Bucket, HostArena, Slot, slots_together
from gpubridge.host_shm.budget import LARGE_BYTES, Body, Budget, piece_bytes
from gpubridge.host_shm.segment import Segment

_RESERVED = 4
"""A segment has addresses for so many times the limit: free ranges between slots are never scarce."""
_PAGE = 4096
_GUARD = 1 << 20
"""Nothing lies in the first bytes: who writes before its slot meets no other mapping of its process."""


class AddressSpace:
    """Cuts ranges from ``size`` bytes; the lowest range that is large enough is cut first."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, size: int) -> None:
        # The free ranges, in order; no two of them touch.
        self._starts = [0]
        self._ends = [size]

    def take(self, nbytes: int) -> int | None:
        """Cut a range; return where it begins, None where no free range is large enough."""
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
        """Take a range back that was cut, and join it with its free neighbours."""
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
    """Hears of the memory of an arena."""

    def created(self, arena: RequestArena) -> Segment:
        """Make the arena's next segment, of `reserved_bytes`."""

    def dropped(self, segment: Segment) -> None:
        """A segment is about to go."""

    def retired(self, segment: Segment) -> None:
        """A pinned segment is to be unpinned; nothing of it comes into use again."""

    def extended(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Another range is in use, of a segment that processes have pinned: they may pin that, too."""


def reserved_bytes(limit: int) -> int:
    """Return the bytes of a segment's addresses."""
    return _GUARD + (-(-_RESERVED * limit // _PAGE) + _RESERVED) * _PAGE


class _Space:
    """A segment, and what of it is cut into slots."""

    __slots__ = ("addresses", "buckets", "pinned", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.addresses = AddressSpace(segment.size)
        self.addresses.take(_GUARD)
        self.buckets: dict[int, _SparseBucket] = {}
        # Whether other processes pin what is in use of it: nothing of it is punched.
        self.pinned = False

    @property
    def idle(self) -> bool:
        """Return whether no slot is lent."""
        return all(bucket.free == bucket.slots for bucket in self.buckets.values())


class _SparseBucket(Bucket):
    """Slots of one size in a range of a space; each is made when it is first needed.

    - ``unmade``: offsets of slots that are not made, the next one last.
    - ``touched``: bytes of its slots that may be in memory.
    - ``pinned``: whether processes may have pinned it, all of which counts as in memory then.
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
    """An arena whose slots lie in one sparse segment; used by one thread at a time.

    Free small slots are lent and taken back by compiled code (`SlotLists`), without a call of Python.

    - ``budget``: of all such arenas; stays the caller's.
    - ``home``: the `Segment.home` of its memory: the model whose requests these are.
    - ``events``: makes its segments, and hears when they go.
    """

    def __init__(self, budget: Budget, home: str, events: ArenaEvents) -> None:
        HostArena.__init__(self, 0, budget.limit)
        self.home = home
        self.budget = budget
        self._events = events
        self._space: _Space | None = None
        # Those with slots still lent, which were pinned.
        self._retired: list[_Space] = []
        SlotLists.__init__(self, self._stacks, self._retired)
        # Slots of bodies that are still arriving.
        self._arriving: dict[Slot, None] = {}
        # Buckets that have slots to be made, by size.
        self._unmade: dict[int, list[_SparseBucket]] = {}
        budget.add(self)

    def allocate_new(self, nbytes: int) -> Slot:
        """Lend a slot of which not all need be in memory yet, but will be; as `HostArena.allocate`."""
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
                # With it goes its segment, if that is pinned and was to be replaced: then there is room.
                used = self.budget.used
                self.free(slot)
                if last or self.budget.used == used:
                    raise
        self._pin_used(slot)
        return slot

    def reserve(self, nbytes: int, body: Body) -> Slot:
        """Lend a slot for a body that arrives: its memory counts as it is handed out, by `grow`.

        Raises BridgeError: UNAVAILABLE when it would never fit; the body is released then.
        """
        try:
            self.budget.check(nbytes)
            slot = HostArena.allocate(self, nbytes)
        except BridgeError:
            body.release()
            raise
        slot.body = body
        self._arriving[slot] = None
        return slot

    def grow(self, slot: Slot, at: int, end: int) -> int:
        """Return up to where a slot has memory for what arrives next of its body; it is counted by now.

        ``at``, ``end``: where in the slot the next byte belongs, and where the body ends.

        Raises BridgeError: UNAVAILABLE when there is no room for it; the slot stays lent.
        """
        assert slot.body is not None
        upto = at + piece_bytes(at, end - at)
        slot.body.charge(upto)
        if upto > slot.touched:
            self._touch(slot, min(-(-upto // _PAGE) * _PAGE, slot.size))
        return upto

    def complete(self, slot: Slot) -> None:
        """Note that the body has arrived: what it holds is not refused any more."""
        if slot.body is not None:
            slot.body.complete()
            self._arriving.pop(slot, None)
            self._pin_used(slot)

    def _touch(self, slot: Slot, nbytes: int) -> None:
        """Count the memory of a slot up to ``nbytes``."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if not bucket.pinned:
            more = nbytes - slot.touched
            self.budget.take(more, large=slot.size > LARGE_BYTES, body=slot.body)
            bucket.touched += more
            self.capacity += more
        slot.touched = nbytes

    def segments(self) -> list[Segment]:
        """Return all segments that exist now: one, but where pinned memory is being replaced."""
        return [space.segment for space in self._spaces()]

    def pin(self, region: int) -> list[tuple[int, int]]:
        """Note that processes pin a segment; return the ranges of it that are in use, to be pinned."""
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
        """Note that the last process is gone that has pinned a segment."""
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
        """Have processes pin where a slot lies whose body is there: not before, as it costs memory."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if bucket.space.pinned and not bucket.pinned:
            self._pin(bucket)
            if bucket.pinned:
                nbytes = bucket.slots * bucket.slot_size
                self._events.extended(bucket.segment, bucket.offset, nbytes)

    def _pin(self, bucket: _SparseBucket) -> None:
        """Count all of a bucket, to be pinned; not where something would have to go for that."""
        rest = bucket.slots * bucket.slot_size - bucket.touched
        if self.budget.has_room(rest):
            self.budget.take(rest, large=True)
            bucket.touched += rest
            self.capacity += rest
            bucket.pinned = True

    def lent(self) -> tuple[int, int]:
        """Return the number of slots lent now, and their bytes."""
        used = [
            (bucket.slots - bucket.free, bucket.slot_size)
            for space in self._spaces()
            for bucket in space.buckets.values()
        ]
        return sum(n for n, _ in used), sum(n * size for n, size in used)

    def trim(self, idle_seconds: float) -> int:
        """Give back the memory of which nothing was used for ``idle_seconds``; return its bytes.

        What is pinned stays: unpinning and pinning hold up all work of a GPU.
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
        """Give back the memory of all that is not lent, or has not arrived, as far as that can be."""
        for space in self._spaces():
            if space.pinned and space.idle:
                self._close(space)
                continue
            if space.pinned:
                self._retire(space)
            else:
                self._punch(space)

    def take_back(self, slot: Slot) -> None:
        """Take a slot back that is charged to a body, or while memory is being replaced."""
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
        """Give every segment back, whoever still looks at it."""
        for space in self._spaces():
            self._close(space)

    def _spaces(self) -> list[_Space]:
        # A list of its own: those who go through it may close some.
        return [*self._retired] if self._space is None else [*self._retired, self._space]

    # -- growing -------------------------------------------------------------------------------

    def _grow(self, size: int, _: str) -> list[Slot]:
        """Make one slot more; returns the stack that it lies on."""
        bucket = self._bucket(size)
        slot = Slot(bucket, bucket.unmade.pop(), size)
        if not bucket.unmade:
            self._unmade[size].remove(bucket)
        bucket.stack.append(slot)
        return bucket.stack

    def _bucket(self, size: int) -> _SparseBucket:
        """Return a bucket that has a slot to be made."""
        known = self._unmade.setdefault(size, [])
        if known:
            return known[-1]
        space = self._space
        if space is None:
            space = self._space = _Space(self._events.created(self))
        count = slots_together(size)
        offset = space.addresses.take(count * size)
        if offset is None:
            raise unavailable(
                f"no {count * size} bytes of free addresses are left for the requests of model "
                f"'{self.home}': send fewer at once, or raise the limit (--request-arena-limit)"
            )
        bucket = _SparseBucket(space, offset, size, count, self._stacks.setdefault(size, []))
        space.buckets[offset] = bucket
        known.append(bucket)
        return bucket

    # -- giving back ---------------------------------------------------------------------------

    def _retire(self, space: _Space) -> None:
        """Have a pinned segment unpinned: no slot of it is lent again, whose pages might be others."""
        self.unpin(space.segment.region)
        self._punch(space)
        for bucket in space.buckets.values():
            self._forget(bucket)
        self._retired.append(space)
        self._space = None
        self._events.retired(space.segment)

    def _punch(self, space: _Space) -> None:
        """Give back the pages of all slots of a space that are not lent."""
        for bucket in list(space.buckets.values()):
            if bucket.free == bucket.slots:
                self._give_back(bucket)
        for stack in self._stacks.values():
            stack[:] = [slot for slot in stack if not self._unmake(slot, space)]
        for slot in self._arriving:
            self._punch_rest(slot, space)

    def _punch_rest(self, slot: Slot, space: _Space) -> None:
        """Give back what a slot has from a request before, and the body in it does not fill yet."""
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
        """Give back the pages of a slot that is not lent, if it is in a space."""
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
        """Give back the memory of a bucket of which no slot is lent."""
        nbytes = bucket.slots * bucket.slot_size
        if not bucket.segment.punch(bucket.offset, nbytes):
            return
        self._forget(bucket)
        self._uncount(bucket.touched)
        del bucket.space.buckets[bucket.offset]
        bucket.space.addresses.give_back(bucket.offset, nbytes)

    def _close(self, space: _Space) -> None:
        """Give back a whole segment."""
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
        """Lend no slot of a bucket again."""
        stack = bucket.stack
        stack[:] = [slot for slot in stack if slot.bucket is not bucket]
        unmade = self._unmade[bucket.slot_size]
        if bucket in unmade:
            unmade.remove(bucket)

    def _uncount(self, nbytes: int) -> None:
        self.capacity -= nbytes
        self.budget.give_back(nbytes)
