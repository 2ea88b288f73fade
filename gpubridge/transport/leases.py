"""Memory lent across the wall: the lender's slots and the borrower's views.

Both directions work alike. The lender gives each slot it lends a lease, sets the lease's byte in the
control page and names it in the tensor references; the borrower clears the byte when its last view
of that memory is gone. A lease thus lasts as long as somebody really looks, not as long as a request:
a model may keep an input, a client may be slow to read an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpubridge.host_shm import Segment, Slot
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.device_regions import is_arena
from gpubridge.transport.lease_book import lease_book
from gpubridge.transport.region_ids import is_read_only

__all__ = ["BorrowedMemory", "LentSlots", "SlotOwner"]

_PATIENCE = 2
"""Leases still out that a short sweep meets before it gives up."""


class KnownSegment(Protocol):
    """Memory of a region, or addresses that stand for it."""

    region: int
    view: memoryview


class SlotOwner(Protocol):
    """Where slots come from, and go back to."""

    def free(self, slot: Any, /) -> None:
        """Take a slot back."""


class LentSlots:
    """The lender's side: numbered leases, each with the slot that is lent under it.

    Parameters
    ----------
    table : memoryview
        The part of the control page with a byte for each lease.
    arena : SlotOwner
        Where slots go when they come back.
    """

    __slots__ = ("_arena", "_free", "_kept", "_slots", "_table")

    def __init__(self, table: memoryview, arena: SlotOwner) -> None:
        self._table = table
        self._arena = arena
        self._free = list(range(len(table) - 1, -1, -1))
        self._slots: dict[int, Any] = {}
        self._kept: dict[int, object] = {}

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

    def return_to(self, owner: SlotOwner) -> None:
        """Give slots that come back to somebody else from now on."""
        self._arena = owner

    def lend(self, slot: object | None) -> int:
        """Lend a slot (or nothing: then only the number is taken); returns the lease."""
        lease = self._free.pop()
        if slot is not None:
            self._table[lease] = 1
            self._slots[lease] = slot
        return lease

    def keep(self, lease: int, kept: object) -> None:
        """Lend memory of others under a lease, too: ``kept``, which owns it, is held until the end."""
        self._table[lease] = 1
        self._kept[lease] = kept

    def slot(self, lease: int) -> Slot | None:
        """Return the slot that is lent under a lease."""
        return self._slots.get(lease)

    def kept(self, lease: int) -> object:
        """Return what is held until the lease ends."""
        return self._kept.get(lease)

    def leases(self) -> list[int]:
        """The leases under which memory of others is lent."""
        return list(self._kept)

    def share(self, lease: int, kept: object) -> None:
        """Let go of a slot, which ``kept`` owns from now on; that is held instead."""
        del self._slots[lease]
        self._kept[lease] = kept

    def settle(self, lease: int) -> bool:
        """Take the slot back if its borrower is done with it; returns whether that was so."""
        if self._table[lease]:
            return False
        slot = self._slots.pop(lease, None)
        if slot is not None:
            self._arena.free(slot)
        if self._kept:
            self._kept.pop(lease, None)
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
        self._kept.pop(lease, None)
        self._free.append(lease)

    def recall(self, lease: int) -> None:
        """Take a slot back whatever its byte says: for a borrower that is dead, or was never told."""
        self._table[lease] = 0
        self.settle(lease)


class BorrowedMemory:
    """The borrower's side: maps regions, and hands out views whose end ends their lease.

    Parameters
    ----------
    table : memoryview
        The part of the control page with a byte for each lease.

    Attributes
    ----------
    arena : bool
        Whether device memory may be among it.
    book : NativeLeaseBook
        Says how many leases last, and of how many bytes.
    """

    __slots__ = ("_segments", "_views", "arena", "book")

    def __init__(self, table: memoryview) -> None:
        self.book = lease_book(table)
        self._views = self.book.views
        self._segments: dict[int, KnownSegment] = {}
        self.arena = False

    def announce(self, region: int, fd: int, size: int) -> None:
        """Map a region from now on; takes over ``fd``.

        Raises
        ------
        BridgeError
            INVALID_ARG when the descriptor is not what was announced.
        """
        segment = Segment.open(region, fd, size, writable=not is_read_only(region))
        self._segments[region] = segment
        self.book.add(region, segment.view)

    def add(self, region: int, memory: memoryview) -> None:
        """Know a region that somebody else has mapped, and owns."""
        self.book.add(region, memory)

    def know(self, segment: KnownSegment) -> None:
        """Know a region that is mapped already, or that cannot be: its views only keep leases."""
        self._segments[segment.region] = segment
        self.book.add(segment.region, segment.view)
        self.arena = self.arena or is_arena(segment.region)

    def knows(self, region: int) -> bool:
        """Whether a region is mapped, or known without that."""
        return region in self._segments

    def segment(self, region: int) -> Any:
        """Return a region that is mapped, to hand it on; it lives while somebody holds it."""
        return self._segments[region]

    def regions(self) -> list[int]:
        """The regions that are mapped."""
        return list(self._segments)

    def drop(self, region: int) -> None:
        """Unmap a region; views that still exist, and who was handed it, keep its memory."""
        self.book.remove(region)
        self._segments.pop(region, None)

    def views(self, refs: Sequence[tuple[int, int, int, int]]) -> Sequence[memoryview]:
        """Return the bytes at places; each lease lasts until the last view under it is gone.

        Raises
        ------
        MalformedMessage
            When a region was never announced, a place is not inside it, or a lease is none.
        """
        try:
            return self._views(refs)
        except ValueError as error:
            raise MalformedMessage(str(error)) from error

    def tensors(
        self,
        refs: Sequence[tuple[int, int, int, int]],
        specs: Sequence[tuple[Any, ...]],
        shapes: Sequence[tuple[int, ...]],
        kind: type[Any],
        placed: bool = True,
        read_only: bool = False,
    ) -> list[Any]:
        """Return tensors of the bytes at places, of a class that has ``_received``, as `views` does.

        Parameters
        ----------
        specs : sequence of (str, str, ...)
            Name and datatype of each.
        shapes : sequence of tuple of int
            The shape of each.
        placed : bool, optional
            Whether they know their places, and so can be handed on.
        read_only : bool, optional
            Whether who looks at them may not write.

        Raises
        ------
        MalformedMessage
            As `views` does.
        """
        try:
            return self.book.tensors(refs, specs, shapes, kind, placed, read_only)
        except ValueError as error:
            raise MalformedMessage(str(error)) from error

    def forget(self, table: memoryview) -> None:
        """Write to ``table`` from now on: this process no longer speaks for the borrower (a fork)."""
        self.book.forget(table)

    def close(self) -> None:
        """Unmap every region."""
        for region in list(self._segments):
            self.drop(region)
