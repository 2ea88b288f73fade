"""Allocator of slots in shared memory, from segments of one slot size each.

Slots are allocated and freed in constant time: free slots of a size lie on a stack, so that the one
freed last (warm in the cache, its pages present) is allocated next. The arena grows by segments up
to a limit and releases unused segments.
"""

from __future__ import annotations

import time
from typing import Callable

from gpubridge.errors import unavailable
from gpubridge.host_shm.budget import Body
from gpubridge.host_shm.segment import Segment

_SMALLEST = 4096
_SMALL_SEGMENT = 1 << 20
_POWERS_UP_TO = 1 << 16
_MOST_IDLE = 16 << 20
"""Idle memory of large slots that stays whatever is in use, when other memory is taken."""


class Slot:
    """A range of a segment, allocated to one user at a time; its ``memory`` is writable.

    ``body``: the large body that it is charged to, or None; ``touched`` bytes may be in memory.
    """

    __slots__ = ("body", "bucket", "memory", "offset", "segment", "size", "touched")

    def __init__(self, bucket: Bucket, offset: int, size: int) -> None:
        self.bucket = bucket
        self.segment = bucket.segment
        self.offset = offset
        self.size = size
        self.memory = bucket.segment.view[offset : offset + size]
        self.body: Body | None = None
        self.touched = 0

    def charge(self, body: Body | None) -> None:
        """Charge the slot to the connection of a large body that it holds."""
        if body is not None:
            body.charge(self.size)
            self.body = body


class Bucket:
    """Adjacent slots of one size in a segment, and their use."""

    __slots__ = ("free", "idle_since", "segment", "slot_size", "slots", "stack")

    def __init__(self, segment: Segment, slot_size: int, slots: int, stack: list[Slot]) -> None:
        self.segment = segment
        self.slot_size = slot_size
        self.slots = slots
        self.free = slots
        self.idle_since = 0.0
        # Stack of free slots of this size, shared with other buckets.
        self.stack = stack


class HostArena:
    """Allocator of shared slots; owns its segments. Used by one thread at a time.

    ``owner`` is the upper half of its region ids; ``kept`` bytes of the limit are reserved for slots of
    at most 64 KiB. ``on_create`` and ``on_drop`` get new segments, and segments about to be closed.
    """

    def __init__(
        self,
        owner: int,
        limit: int,
        on_create: Callable[[Segment], None] | None = None,
        on_drop: Callable[[Segment], None] | None = None,
        kept: int = 0,
    ) -> None:
        self.limit = limit
        self._kept = kept
        self.capacity = 0
        self._owner = owner
        self._made = 0
        self._on_create = on_create
        self._on_drop = on_drop
        # By slot size, or by (slot size, home) for slots of one home.
        self._stacks: dict[object, list[Slot]] = {}
        self._buckets: dict[int, Bucket] = {}

    def allocate(self, nbytes: int, home: str = "") -> Slot:
        """Allocate a slot of at least ``nbytes`` bytes, with undefined contents; see :meth:`free`.

        ``home``: the `Segment.home` of the memory. Slots of different homes never share a segment.

        Raises BridgeError: UNAVAILABLE when the arena is at its limit.
        """
        size = slot_size(nbytes)
        stack = self._free(size, home) or self._grow(size, home)
        slot = stack.pop()
        slot.bucket.free -= 1
        return slot

    def has_free(self, nbytes: int, home: str = "") -> bool:
        """Return whether `allocate` needs no new memory."""
        return self._free(slot_size(nbytes), home) is not None

    def _free(self, size: int, home: str) -> list[Slot] | None:
        """Return a stack with a free slot: of a size, or of one up to twice as large where sizes are many."""
        largest = 2 * size if size > _POWERS_UP_TO else size
        while size <= largest:
            stack = self._stacks.get((size, home) if home else size)
            if stack:
                return stack
            size = slot_size(size + 1)
        return None

    def free(self, slot: Slot) -> None:
        """Free a slot, which may be allocated again."""
        bucket = slot.bucket
        bucket.free += 1
        if bucket.free == bucket.slots:
            bucket.idle_since = time.monotonic()
        bucket.stack.append(slot)

    def segments(self) -> list[Segment]:
        """Return all segments that exist now."""
        return [bucket.segment for bucket in self._buckets.values()]

    def lent(self) -> tuple[int, int]:
        """Return the number of allocated slots, and their bytes."""
        used = [(b.slots - b.free, b.slot_size) for b in self._buckets.values()]
        return sum(n for n, _ in used), sum(n * size for n, size in used)

    def trim(self, idle_seconds: float) -> int:
        """Close the segments without used slots for ``idle_seconds``; returns the bytes released.

        Pinned segments stay: pinning and unpinning delay all work of the GPU.
        """
        before = self.capacity
        self._drop_idle(idle_seconds, pinned=False)
        return before - self.capacity

    def close(self) -> None:
        """Close all segments, even if slots are allocated."""
        for bucket in list(self._buckets.values()):
            self._drop(bucket)

    def _grow(self, size: int, home: str) -> list[Slot]:
        count = slots_together(size)
        if size > _POWERS_UP_TO:
            self._drop_beyond(_MOST_IDLE)
        most = self.limit if size <= _POWERS_UP_TO else self.limit - self._kept
        if self.capacity + size * count > most:
            self._drop_idle(0.0, pinned=True)
            count = min(count, (most - self.capacity) // size)
        if count <= 0:
            raise unavailable(
                # Triton's words, which clients look for, before ours.
                "Failed to increase the shared memory pool size: "
                f"shared memory arena is full: {size} bytes asked for, {self.capacity} of "
                f"{self.limit} bytes are in use; send fewer or smaller requests at once, or raise "
                "the limit"
            )
        self._made += 1
        segment = Segment.create(self._owner << 32 | self._made, size * count, home)
        stack = self._stacks.setdefault((size, home) if home else size, [])
        bucket = Bucket(segment, size, count, stack)
        self.capacity += segment.size
        self._buckets[segment.region] = bucket
        if self._on_create is not None:
            self._on_create(segment)
        # The lowest offset ends on top of the stack.
        stack.extend(Slot(bucket, i * size, size) for i in reversed(range(count)))
        return stack

    def _drop_idle(self, idle_seconds: float, *, pinned: bool) -> None:
        oldest = time.monotonic() - idle_seconds
        for bucket in list(self._buckets.values()):
            idle = bucket.free == bucket.slots and bucket.idle_since <= oldest
            if idle and (pinned or not bucket.segment.pinned):
                self._drop(bucket)

    def _drop_beyond(self, most: int) -> None:
        """Close segments of large slots, the longest unused first, beyond as much idle memory as is in use."""
        large = [b for b in self._buckets.values() if b.slot_size > _POWERS_UP_TO]
        idle = [b for b in large if b.free == b.slots and not b.segment.pinned]
        nbytes = sum(b.segment.size for b in idle)
        most = max(most, sum(b.segment.size for b in large) - nbytes)
        for bucket in sorted(idle, key=lambda b: b.idle_since):
            if nbytes <= most:
                break
            nbytes -= bucket.segment.size
            self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        stack = bucket.stack
        stack[:] = [slot for slot in stack if slot.bucket is not bucket]
        del self._buckets[bucket.segment.region]
        self.capacity -= bucket.segment.size
        if self._on_drop is not None:
            self._on_drop(bucket.segment)
        bucket.segment.close()


def slot_size(nbytes: int) -> int:
    """Return the slot size for ``nbytes``: powers of two, above 64 KiB in quarter steps."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    bits = (nbytes - 1).bit_length()
    if nbytes <= _POWERS_UP_TO:
        return 1 << bits
    shift = bits - 3
    return (((nbytes - 1) >> shift) + 1) << shift


def slots_together(size: int) -> int:
    """Return the number of slots of a size that are made at once: they fill whole pages, also of 64 KiB.

    They are pinned together, and the driver pins no page twice.
    """
    if size <= _POWERS_UP_TO:
        return _SMALL_SEGMENT // size
    return max(1, min(4, _SMALL_SEGMENT // size))
