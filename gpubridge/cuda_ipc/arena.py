"""Slots of device memory, allocated from one segment without a call of the driver.

Allocation is first fit by address, and adjacent free blocks are merged: few slots are allocated at a
time, and a tensor may take most of the arena.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque

from gpubridge.cuda_ipc.segment import DeviceSegment
from gpubridge.errors import BridgeError, InternalError, unavailable

# The alignment that DLPack asks of exporters, and that the driver's own allocations have.
_ALIGNMENT = 256


class DeviceSlot:
    """A block of an arena, allocated to one user; free it with `DeviceArena.free`."""

    __slots__ = ("lent", "offset", "pointer", "segment", "size")

    def __init__(self, segment: DeviceSegment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.pointer = segment.pointer + offset
        self.lent = True


class DeviceArena:
    """Allocates slots of a segment, which it does not own; any thread or finalizer may free them."""

    def __init__(self, segment: DeviceSegment) -> None:
        self.segment = segment
        self._lock = threading.Lock()
        # Free blocks by their offset, none adjacent to another.
        self._offsets = [0]
        self._sizes = [segment.size]
        self._slots = 0
        self._lent = 0
        # Merged by the next allocation: a finalizer may run in the middle of one.
        self._returned: deque[DeviceSlot] = deque()

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Return a slot as `try_allocate` does; UNAVAILABLE if no free block is large enough."""
        slot = self.try_allocate(nbytes)
        if slot is None:
            raise full_error(nbytes, self.segment.size, self.lent()[1], self.largest())
        return slot

    def try_allocate(self, nbytes: int) -> DeviceSlot | None:
        """Return a slot of undefined bytes, aligned to 256; None if no free block is large enough."""
        size = slot_bytes(nbytes)
        with self._lock:
            self._merge_returned()
            for index, free in enumerate(self._sizes):
                if free >= size:
                    return self._cut(index, size)
        return None

    def free(self, slot: DeviceSlot) -> None:
        """Free a slot, which no stream uses any more; InternalError if it is not allocated."""
        if not slot.lent or slot.segment is not self.segment:
            raise InternalError(
                f"the slot at {slot.offset} of device region {slot.segment.region} is not lent"
            )
        slot.lent = False
        self._returned.append(slot)

    def retire(self) -> bool:
        """Refuse further allocations; returns False, and does nothing, if a slot is allocated."""
        with self._lock:
            self._merge_returned()
            if self._slots:
                return False
            self._offsets, self._sizes = [], []
            return True

    def lent(self) -> tuple[int, int]:
        """Number of allocated slots, and their bytes."""
        with self._lock:
            self._merge_returned()
            return self._slots, self._lent

    def largest(self) -> int:
        """Return the bytes of the largest free block."""
        with self._lock:
            self._merge_returned()
            return max(self._sizes, default=0)

    def _cut(self, index: int, size: int) -> DeviceSlot:
        offset = self._offsets[index]
        if self._sizes[index] == size:
            del self._offsets[index], self._sizes[index]
        else:
            self._offsets[index] += size
            self._sizes[index] -= size
        self._slots += 1
        self._lent += size
        return DeviceSlot(self.segment, offset, size)

    def _merge_returned(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._slots -= 1
            self._lent -= slot.size
            self._merge(slot.offset, slot.size)

    def _merge(self, offset: int, size: int) -> None:
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
            return
        self._offsets.insert(index, offset)
        self._sizes.insert(index, size)


def slot_bytes(nbytes: int) -> int:
    """Return the size of the slot for ``nbytes``."""
    return max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT


def full_error(nbytes: int, limit: int, lent: int, largest: int) -> BridgeError:
    """Return the error for ``nbytes`` of an arena that has ``lent`` of ``limit`` bytes allocated."""
    if slot_bytes(nbytes) > limit:
        return unavailable(
            f"device memory arena of {limit} bytes is too small: {nbytes} bytes asked for; raise "
            "--backend-config=python,device-arena-bytes=N"
        )
    return unavailable(
        f"device memory arena is full: {nbytes} bytes asked for, {lent} of {limit} bytes are in "
        f"use, the largest free piece has {largest}; send fewer or smaller requests at once, or "
        "raise --backend-config=python,device-arena-bytes=N"
    )
