"""Leases of memory between processes: the lender's slots and the borrower's views.

Both directions work alike. The lender gives each slot a lease, sets the lease's byte in the control
page and names it in the tensor references; the borrower clears the byte when its last view of that
memory is deleted. A lease thus lasts as long as the memory is used, not as long as the request: a
model may keep an input, and a client may be slow to read a response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.host_shm import Segment
from gpubridge.tensor.native import native
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.device_events import is_arena

if TYPE_CHECKING:
    from gpubridge.transport.lease_book import LeaseBook

_READ_ONLY = 1 << 30
"""Bit in the lower half of a region id; regions count from 1, device arenas have the next bit."""

_PATIENCE = 2
"""A short sweep ends after this many leases that are still in use."""


def read_only_id(region: int) -> int:
    """Return the id by which a region is mapped read-only."""
    return region | _READ_ONLY


def is_read_only(region: int) -> bool:
    """Return whether an id maps its region read-only."""
    return region & _READ_ONLY != 0


class KnownSegment(Protocol):
    """A region: its id, and its memory or reserved addresses."""

    region: int
    view: memoryview


class LentSlots:
    """Lender's side: numbered leases, each with the slot that it lends.

    ``table`` has a byte for each lease; ``free`` gets the returned slots.
    """

    def __init__(self, table: memoryview, free: Callable[[Any], None]) -> None:
        self._table = table
        self._take_back = free
        self._unused = 0
        self._free: list[int] = []
        self._slots: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        """Number of unused leases."""
        return len(self._free) + len(self._table) - self._unused

    @property
    def exhausted(self) -> bool:
        """Return whether all leases are in use."""
        return not self.free

    def lend(self, slot: object | None) -> int:
        """Lend a slot, or with None only reserve a lease; returns the lease."""
        if self._free:
            lease = self._free.pop()
        else:
            lease, self._unused = self._unused, self._unused + 1
        if slot is not None:
            self._table[lease] = 1
            self._slots[lease] = slot
        return lease

    def reclaim(self, lease: int) -> bool:
        """Free the slot of a lease if the borrower is done with it; returns whether it was."""
        if self._table[lease]:
            return False
        slot = self._slots.pop(lease, None)
        if slot is not None:
            self._take_back(slot)
        self._free.append(lease)
        return True

    def sweep(self) -> None:
        """Reclaim all ended leases, oldest first."""
        for lease in list(self._slots):
            self.reclaim(lease)

    def sweep_oldest(self) -> None:
        """Reclaim ended leases from the oldest on, until a few are found that are still in use.

        Leases end nearly in order. The ones still in use are moved to the end, so that a slow reader
        does not delay the others.
        """
        slots = self._slots
        patience = _PATIENCE
        while slots and patience:
            lease = next(iter(slots))
            if not self.reclaim(lease):
                slots[lease] = slots.pop(lease)
                patience -= 1

    def recall(self, lease: int) -> None:
        """End a lease regardless of its byte: the borrower is dead, or never got the reference."""
        self._table[lease] = 0
        self.reclaim(lease)


def _new_book(table: memoryview) -> LeaseBook:
    """Return a book of borrowed memory's views; ``table`` has a byte for each lease."""
    compiled = native()
    if compiled is not None:
        book: LeaseBook = compiled.LeaseBook(table)
        return book
    # It needs NumPy, which the server does without.
    from gpubridge.transport import lease_book  # noqa: PLC0415

    return lease_book.LeaseBook(table)


class BorrowedMemory:
    """Borrower's side: maps regions, and returns views whose deletion ends their lease.

    ``arena``: whether a device arena is among the regions; ``book``: the views.
    """

    __slots__ = ("_segments", "_table", "_views", "arena", "book")

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self.book = _new_book(table)
        self._views = self.book.views
        self._segments: dict[int, KnownSegment] = {}
        self.arena = False

    def announce(self, region: int, fd: int, size: int, home: str = "") -> None:
        """Map a region with a `Segment.home`; takes over ``fd``. May raise BridgeError."""
        segment = Segment.open(region, fd, size, home, writable=not is_read_only(region))
        self._segments[region] = segment
        self.book.add(region, segment.view)

    def add(self, region: int, memory: memoryview) -> None:
        """Add a region that the caller has mapped, and owns."""
        self.book.add(region, memory)

    def add_segment(self, segment: KnownSegment) -> None:
        """Add a region that is mapped already, or reserved addresses whose views only keep leases."""
        self._segments[segment.region] = segment
        self.book.add(segment.region, segment.view)
        self.arena = self.arena or is_arena(segment.region)

    def is_known(self, region: int) -> bool:
        """Return whether a region was added."""
        return region in self._segments

    def segment(self, region: int) -> Any:
        """Return the segment of a region, which lives as long as a reference to it."""
        return self._segments[region]

    def regions(self) -> list[int]:
        """Return the ids of all regions."""
        return list(self._segments)

    def drop(self, region: int) -> None:
        """Remove a region; existing views and references to its segment keep the memory."""
        self.book.remove(region)
        self._segments.pop(region, None)

    def views(self, refs: Sequence[tuple[int, int, int, int]]) -> Sequence[memoryview]:
        """Return views of references; each lease lasts until its last view is deleted.

        Raises MalformedMessage for an unknown region, a range outside of it, or an invalid lease.
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
        """Return tensors, of a class with ``_received``, over references; raises as `views`.

        - ``placed``: whether the tensors keep their references, and so can be sent uncopied.
        - ``read_only``: whether the tensors are read-only.
        """
        try:
            return self.book.tensors(refs, specs, shapes, kind, placed, read_only)
        except ValueError as error:
            raise MalformedMessage(str(error)) from error

    def release(self, refs: Sequence[tuple[int, int, int, int]]) -> None:
        """End the leases of references that are not used: no view would end them."""
        for *_, lease in refs:
            if lease < len(self._table):
                self._table[lease] = 0

    def forget(self, table: memoryview) -> None:
        """Use another table from now on: a forked child must not end the borrower's leases."""
        self._table = table
        self.book.forget(table)

    def close(self) -> None:
        """Unmap every region."""
        for region in list(self._segments):
            self.drop(region)
