"""The memory that the requests of one model arrive in: slots cut from one sparse memfd.

The memfd is as large as its model could ever need, and costs what is used of it: a page is there from
the first byte that is written to it until it is given back by a hole. So sizes do not starve each
other: the pages of a free slot of one size make room for a slot of any other.
"""

from __future__ import annotations

import time
from typing import Protocol

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm.address_space import AddressSpace
from gpubridge.host_shm.arena import Bucket, HostArena, Slot, slots_together
from gpubridge.host_shm.segment import Segment

__all__ = ["ArenaEvents", "MemoryLimit", "RequestArena"]

_RESERVED = 4
"""A segment has addresses for so many times the limit: free ranges between slots are never scarce."""
_PAGE = 4096
_GUARD = 1 << 20
"""Nothing lies in the first bytes: who writes before its slot meets no other mapping of its process."""


class ArenaEvents(Protocol):
    """Hears of the memory of an arena."""

    def created(self, arena: RequestArena) -> Segment:
        """Make the arena's next segment, of `MemoryLimit.reserved` bytes."""

    def dropped(self, segment: Segment) -> None:
        """A segment is about to go."""

    def extended(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Slots will be cut from another range of a segment that processes have pinned."""


class MemoryLimit:
    """Bytes that all arenas of requests together may have in memory.

    Parameters
    ----------
    limit : int

    Attributes
    ----------
    used : int
        Bytes of all slots whose pages may be there, lent or not.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._arenas: list[RequestArena] = []

    @property
    def reserved(self) -> int:
        """Bytes of a segment's addresses."""
        return _GUARD + (-(-_RESERVED * self.limit // _PAGE) + _RESERVED) * _PAGE

    def add(self, arena: RequestArena) -> None:
        """Have a say in an arena's memory."""
        self._arenas.append(arena)

    def take(self, nbytes: int) -> None:
        """Count the memory of a slot that is about to be used.

        Raises
        ------
        BridgeError
            UNAVAILABLE when there is no room even with all free slots given back.
        """
        if self.used + nbytes > self.limit:
            for arena in self._arenas:
                arena.reclaim()
                if self.used + nbytes <= self.limit:
                    break
            else:
                raise self._full(nbytes)
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count memory no more, whose pages are gone."""
        self.used -= nbytes

    def _full(self, nbytes: int) -> BridgeError:
        if nbytes > self.limit:
            return BridgeError(
                f"a request that takes {nbytes} bytes of memory cannot be served: all requests "
                f"together have {self.limit} bytes (--request-arena-limit)",
                ErrorCode.UNAVAILABLE,
            )
        return BridgeError(
            f"shared memory arena is full: {nbytes} bytes asked for, {self.used} of "
            f"{self.limit} bytes are in use; send fewer or smaller requests at once, or raise "
            "the limit (--request-arena-limit)",
            ErrorCode.UNAVAILABLE,
        )


class _Space:
    """A segment, and what of it is cut into slots."""

    __slots__ = ("addresses", "buckets", "pinned", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.addresses = AddressSpace(segment.size)
        self.addresses.take(_GUARD)
        self.buckets: dict[int, _SparseBucket] = {}
        # Whether other processes may have its ranges pinned: those must not be punched.
        self.pinned = False

    @property
    def idle(self) -> bool:
        """Whether no slot is lent."""
        return all(bucket.free == bucket.slots for bucket in self.buckets.values())


class _SparseBucket(Bucket):
    """Slots of one size in a range of a space; each is made when it is first needed.

    Attributes
    ----------
    unmade : list of int
        Offsets of slots that take no memory, the next one last.
    """

    __slots__ = ("offset", "space", "unmade")

    def __init__(
        self, space: _Space, offset: int, size: int, count: int, stack: list[Slot]
    ) -> None:
        super().__init__(space.segment, size, count, stack)
        self.space = space
        self.offset = offset
        self.unmade = [offset + i * size for i in reversed(range(count))]

    @property
    def made_bytes(self) -> int:
        """Bytes of the slots that are made."""
        return (self.slots - len(self.unmade)) * self.slot_size


class RequestArena(HostArena):
    """An arena whose slots lie in one sparse segment; used by one thread at a time.

    Parameters
    ----------
    memory : MemoryLimit
        Of all such arenas; stays the caller's.
    home : str
        The `Segment.home` of its memory: the model whose requests these are.
    events : ArenaEvents
        Makes its segments, and hears when they go.
    """

    def __init__(self, memory: MemoryLimit, home: str, events: ArenaEvents) -> None:
        super().__init__(0, memory.limit)
        self.home = home
        self._memory = memory
        self._events = events
        self._space: _Space | None = None
        # Those with slots still lent whose other memory is pinned, and cannot be given back.
        self._retired: list[_Space] = []
        # Buckets that have slots to be made, by size.
        self._unmade: dict[int, list[_SparseBucket]] = {}
        memory.add(self)

    def segments(self) -> list[Segment]:
        """Return all segments that exist now: one, but where pinned memory is being replaced."""
        return [space.segment for space in self._spaces()]

    def pin(self, region: int) -> list[tuple[int, int]]:
        """Note that processes pin a segment; return the ranges of it that are in use, to be pinned."""
        for space in self._spaces():
            if space.segment.region == region:
                space.pinned = True
                return [
                    (bucket.offset, bucket.slots * bucket.slot_size)
                    for bucket in space.buckets.values()
                ]
        return []

    def lent(self) -> tuple[int, int]:
        """Return the number of slots lent now, and their bytes."""
        used = [
            (bucket.slots - bucket.free, bucket.slot_size)
            for space in self._spaces()
            for bucket in space.buckets.values()
        ]
        return sum(n for n, _ in used), sum(n * size for n, size in used)

    def trim(self, idle_seconds: float) -> int:
        """Give back the memory of which nothing was used for ``idle_seconds``; return its bytes."""
        before = self.capacity
        oldest = time.monotonic() - idle_seconds
        for space in self._spaces():
            buckets = list(space.buckets.values())
            idle = [b for b in buckets if b.free == b.slots and b.idle_since <= oldest]
            if len(idle) == len(buckets):
                self._close(space)
            elif not space.pinned:
                for bucket in idle:
                    self._give_back(bucket)
        return before - self.capacity

    def reclaim(self) -> None:
        """Give back the memory of all slots that are not lent, as far as that can be."""
        for space in self._spaces():
            if not space.pinned:
                self._punch(space)
            elif space.idle:
                self._close(space)
            elif space is self._space:
                # What is pinned goes with the segment: no slot of it is lent again.
                self._retired.append(space)
                self._space = None
                for bucket in space.buckets.values():
                    self._forget(bucket)

    def free(self, slot: Slot) -> None:
        """Take a slot back; its memory may be lent again at once."""
        super().free(slot)
        if self._retired:
            bucket = slot.bucket
            assert isinstance(bucket, _SparseBucket)
            if bucket.space is not self._space:
                self._forget(bucket)
                if bucket.space.idle:
                    self._close(bucket.space)

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
        self._memory.take(size)
        try:
            bucket = self._bucket(size)
        except BridgeError:
            self._memory.give_back(size)
            raise
        self.capacity += size
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
            raise BridgeError(
                f"no {count * size} bytes of free addresses are left for the requests of model "
                f"'{self.home}': send fewer at once, or raise the limit (--request-arena-limit)",
                ErrorCode.UNAVAILABLE,
            )
        bucket = _SparseBucket(space, offset, size, count, self._stacks.setdefault(size, []))
        space.buckets[offset] = bucket
        known.append(bucket)
        if space.pinned:
            self._events.extended(space.segment, offset, count * size)
        return bucket

    # -- giving back ---------------------------------------------------------------------------

    def _punch(self, space: _Space) -> None:
        """Give back the pages of all slots of a space that are not lent."""
        for bucket in list(space.buckets.values()):
            if bucket.free == bucket.slots:
                self._give_back(bucket)
        for stack in self._stacks.values():
            stack[:] = [slot for slot in stack if not self._unmake(slot, space)]

    def _unmake(self, slot: Slot, space: _Space) -> bool:
        """Give back the pages of a slot that is not lent, if it is in a space."""
        bucket = slot.bucket
        assert isinstance(bucket, _SparseBucket)
        if bucket.space is not space or not space.segment.punch(slot.offset, slot.size):
            return False
        if not bucket.unmade:
            self._unmade[bucket.slot_size].append(bucket)
        bucket.unmade.append(slot.offset)
        self._uncount(slot.size)
        return True

    def _give_back(self, bucket: _SparseBucket) -> None:
        """Give back the memory of a bucket of which no slot is lent."""
        nbytes = bucket.slots * bucket.slot_size
        if not bucket.segment.punch(bucket.offset, nbytes):
            return
        self._forget(bucket)
        self._uncount(bucket.made_bytes)
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
            self._uncount(bucket.made_bytes)
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
        self._memory.give_back(nbytes)
