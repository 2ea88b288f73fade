"""Memory lent across the wall: the lender's slots and the borrower's views.

Both directions work alike. The lender gives each slot it lends a lease, sets the lease's byte in the
control page and names it in the tensor references; the borrower clears the byte when its last view
of that memory is gone. A lease thus lasts as long as somebody really looks, not as long as a request:
a model may keep an input, a client may be slow to read an answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpubridge.host_shm import HostArena, Segment, Slot
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.control import NO_LEASE

__all__ = ["BorrowedMemory", "LentSlots"]

_PATIENCE = 2
"""Leases still out that a short sweep meets before it gives up."""


class LentSlots:
    """The lender's side: numbered leases, each with the slot that is lent under it.

    Parameters
    ----------
    table : memoryview
        The part of the control page with a byte for each lease.
    arena : HostArena
        Where slots go when they come back.
    """

    __slots__ = ("_arena", "_free", "_slots", "_table")

    def __init__(self, table: memoryview, arena: HostArena) -> None:
        self._table = table
        self._arena = arena
        self._free = list(range(len(table) - 1, -1, -1))
        self._slots: dict[int, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        """How many leases are left."""
        return len(self._free)

    @property
    def exhausted(self) -> bool:
        """Whether no lease is left."""
        return not self._free

    def lend(self, slot: Slot | None) -> int:
        """Lend a slot (or nothing: then only the number is taken); returns the lease."""
        lease = self._free.pop()
        if slot is not None:
            self._table[lease] = 1
            self._slots[lease] = slot
        return lease

    def settle(self, lease: int) -> bool:
        """Take the slot back if its borrower is done with it; returns whether that was so."""
        if self._table[lease]:
            return False
        slot = self._slots.pop(lease, None)
        if slot is not None:
            self._arena.free(slot)
        self._free.append(lease)
        return True

    def sweep(self) -> None:
        """Settle every lease, oldest first."""
        for lease in list(self._slots):
            self.settle(lease)

    def sweep_oldest(self) -> None:
        """Settle leases from the oldest on, until a few are met that are still out.

        Leases end nearly in order, so this finds most of them at no cost for those still out. Those
        that it met are asked last from then on: one slow reader must not hold up all others.
        """
        slots = self._slots
        patience = _PATIENCE
        while slots and patience:
            lease = next(iter(slots))
            if not self.settle(lease):
                slots[lease] = slots.pop(lease)
                patience -= 1

    def withdraw(self, lease: int) -> None:
        """End a lease that its borrower never used; the slot stays with whoever had it lent."""
        self._table[lease] = 0
        self._slots.pop(lease, None)
        self._free.append(lease)

    def recall(self, lease: int) -> None:
        """Take a slot back whatever its byte says: for a borrower that is dead, or was never told."""
        self._table[lease] = 0
        self.settle(lease)


class _View(weakref.ref):  # type: ignore[type-arg]
    """Watches one view of lent memory; knows its lease and size."""

    __slots__ = ("lease", "nbytes")
    lease: int
    nbytes: int


class BorrowedMemory:
    """The borrower's side: maps regions, and hands out views whose end ends their lease.

    Parameters
    ----------
    table : memoryview
        The part of the control page with a byte for each lease.

    Attributes
    ----------
    held_bytes : int
        Bytes of all views that exist.
    """

    __slots__ = ("_arrays", "_leases", "_segments", "_table", "held_bytes")

    def __init__(self, table: memoryview) -> None:
        self.held_bytes = 0
        self._table = table
        self._segments: dict[int, Segment] = {}
        self._arrays: dict[int, Any] = {}
        self._leases: dict[int, list[_View]] = {}

    @property
    def held(self) -> int:
        """How many leases last, because views under them exist."""
        return len(self._leases)

    def announce(self, region: int, fd: int, size: int) -> None:
        """Map a region from now on; takes over ``fd``.

        Raises
        ------
        BridgeError
            INVALID_ARG when the descriptor is not what was announced.
        """
        segment = Segment.open(region, fd, size)
        self._segments[region] = segment
        self._arrays[region] = np.frombuffer(segment.view, np.uint8)

    def drop(self, region: int) -> None:
        """Unmap a region; views that still exist keep their memory."""
        self._arrays.pop(region, None)
        segment = self._segments.pop(region, None)
        if segment is not None:
            segment.close()

    def view(self, region: int, offset: int, nbytes: int, lease: int) -> memoryview:
        """Return the bytes at a place; the lease lasts until the last view under it is gone.

        Raises
        ------
        MalformedMessage
            When the region was never announced, the place is not inside it, or the lease is none.
        """
        if lease == NO_LEASE and nbytes == 0:
            return memoryview(b"")
        segment = self._segments.get(region)
        if segment is None or offset + nbytes > segment.size or lease >= len(self._table):
            raise MalformedMessage(
                f"{nbytes} bytes at {offset} of region {region:#x} under lease {lease} do not exist"
            )
        # What is watched is an array that exports the bytes. A memoryview would not do: a view of a
        # view refers to the exporter only, and NumPy and uvloop both make their own at once.
        array = self._arrays[region][offset : offset + nbytes]
        watch = _View(array, self._ended)
        watch.lease = lease
        watch.nbytes = nbytes
        self.held_bytes += nbytes
        watches = self._leases.get(lease)
        if watches is None:
            self._leases[lease] = [watch]
        else:
            watches.append(watch)
        return memoryview(array)

    def views(self, refs: Sequence[tuple[int, int, int, int]]) -> list[memoryview]:
        """Return the bytes at several places; the tensors of a record mostly share slot and lease.

        Raises
        ------
        MalformedMessage
            As :meth:`view` does.
        """
        if len(refs) > 1:
            region, start, size, lease = refs[0]
            end = start + size
            for ref in refs:
                if ref[0] != region or ref[3] != lease or ref[1] < start:
                    break
                end = max(end, ref[1] + ref[2])
            else:
                # One watched array for all: each view of it keeps it alive.
                whole = self.view(region, start, end - start, lease)
                return [whole[ref[1] - start : ref[1] - start + ref[2]] for ref in refs]
        return [self.view(*ref) for ref in refs]

    def forget(self, table: memoryview) -> None:
        """Write to ``table`` from now on: this process no longer speaks for the borrower (a fork)."""
        self._table = table

    def close(self) -> None:
        """Unmap every region."""
        for region in list(self._segments):
            self.drop(region)

    def _ended(self, watch: weakref.ref[Any]) -> None:
        # Any thread may drop the last view: each step here is one that the GIL makes whole.
        lease = watch.lease  # type: ignore[attr-defined]
        self.held_bytes -= watch.nbytes  # type: ignore[attr-defined]
        watches = self._leases[lease]
        watches.remove(watch)  # type: ignore[arg-type]
        if not watches:
            del self._leases[lease]
            self._table[lease] = 0
