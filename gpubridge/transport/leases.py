"""Memory lent between processes: the lender's slots and the borrower's views.

Both directions work alike. The lender gives each slot it lends a lease, sets the lease's byte in the
control page and names it in the tensor references; the borrower clears the byte when its last view
of that memory is gone. A lease thus lasts as long as somebody really looks, not as long as a request:
a model may keep an input, a client may be slow to read an answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from gpubridge.host_shm import Segment
from gpubridge.tensor.native import native
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.device_events import is_arena

_READ_ONLY = 1 << 30
"""In the lower half of an id; regions are numbered from 1, and device arenas have the bit above."""

_PATIENCE = 2
"""Leases still out that a short sweep meets before it gives up."""


def read_only_id(region: int) -> int:
    """Return the id by which a region is mapped to be read only."""
    return region | _READ_ONLY


def is_read_only(region: int) -> bool:
    """Return whether an id maps its region read-only."""
    return region & _READ_ONLY != 0


class _View(weakref.ref):  # type: ignore[type-arg]
    """Watches one view of lent memory; knows its lease and size."""

    __slots__ = ("lease", "nbytes")
    lease: int
    nbytes: int


class LeaseBook:
    """The views that exist of lent memory; the compiled module has one of the same behaviour.

    ``table`` has a byte for each lease, cleared when that ends; ``held_bytes`` are those of all
    views.
    """

    __slots__ = ("_arrays", "_leases", "_table", "held_bytes")

    def __init__(self, table: memoryview) -> None:
        self.held_bytes = 0
        self._table = table
        self._arrays: dict[int, Any] = {}
        self._leases: dict[int, list[_View]] = {}

    @property
    def held(self) -> int:
        """Return the number of leases that last because views under them exist."""
        return len(self._leases)

    def add(self, region: int, memory: memoryview) -> None:
        """Know a region's memory from now on."""
        self._arrays[region] = np.frombuffer(memory, np.uint8)

    def remove(self, region: int) -> None:
        """Know a region no more; views of it that exist keep its memory."""
        self._arrays.pop(region, None)

    def forget(self, table: memoryview) -> None:
        """Write to ``table`` from now on."""
        self._table = table

    def views(self, refs: Sequence[tuple[int, int, int, int]]) -> Sequence[memoryview]:
        """Return the bytes at places (region, offset, nbytes, lease), or raise ValueError."""
        if len(refs) > 1:
            region, start, size, lease = refs[0]
            end = start + size
            for ref in refs:
                if ref[0] != region or ref[3] != lease or ref[1] < start:
                    break
                end = max(end, ref[1] + ref[2])
            else:
                # The tensors of a record mostly share slot and lease: one watched array for all,
                # which each view of it keeps alive.
                whole = self._view(region, start, end - start, lease)
                return [whole[ref[1] - start : ref[1] - start + ref[2]] for ref in refs]
        return [self._view(*ref) for ref in refs]

    def tensors(
        self,
        refs: Sequence[tuple[int, int, int, int]],
        specs: Sequence[tuple[Any, ...]],
        shapes: Sequence[tuple[int, ...]],
        kind: type[Any],
        placed: bool,
        read_only: bool,
    ) -> list[Any]:
        """Return what a tensors' class makes of the bytes at places; raises as `views`."""
        views = self.views(refs)
        if read_only:
            views = [view.toreadonly() for view in views]
        return [
            kind._received(spec[0], spec[1], shape, view, ref if placed else None)
            for spec, shape, view, ref in zip(specs, shapes, views, refs)
        ]

    def _view(self, region: int, offset: int, nbytes: int, lease: int) -> memoryview:
        if lease == NO_LEASE and nbytes == 0:
            return memoryview(b"")
        memory = self._arrays.get(region)
        if memory is None or offset + nbytes > memory.size or lease >= len(self._table):
            raise ValueError(
                f"{nbytes} bytes at {offset} of region {region:#x} under lease {lease} do not exist"
            )
        # What is watched is an array that exports the bytes. A memoryview would not do: a view of a
        # view refers to the exporter only, and NumPy and uvloop both make their own at once.
        array = memory[offset : offset + nbytes]
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

    def _ended(self, watch: weakref.ref[Any]) -> None:
        # Any thread may drop the last view: each step here is one that the GIL makes whole.
        lease = watch.lease  # type: ignore[attr-defined]
        self.held_bytes -= watch.nbytes  # type: ignore[attr-defined]
        watches = self._leases[lease]
        watches.remove(watch)  # type: ignore[arg-type]
        if not watches:
            del self._leases[lease]
            self._table[lease] = 0


class KnownSegment(Protocol):
    """Memory of a region, or addresses that stand for it."""

    region: int
    view: memoryview


class LentSlots:
    """The lender's side: numbered leases, each with the slot that is lent under it.

    ``table`` has a byte for each lease; ``free`` takes slots back.
    """

    def __init__(self, table: memoryview, free: Callable[[Any], None]) -> None:
        self._table = table
        self._take_back = free
        self._free = list(range(len(table) - 1, -1, -1))
        self._slots: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        """Return the number of leases that are left."""
        return len(self._free)

    @property
    def exhausted(self) -> bool:
        """Return whether no lease is left."""
        return not self._free

    def lend(self, slot: object | None) -> int:
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
            self._take_back(slot)
        self._free.append(lease)
        return True

    def sweep(self) -> None:
        """Settle every lease, oldest first."""
        for lease in list(self._slots):
            self.settle(lease)

    def sweep_oldest(self) -> None:
        """Settle leases from the oldest on, until a few are met that are still out.

        Leases end nearly in order. Those that it met are asked last: a slow reader holds up no
        others.
        """
        slots = self._slots
        patience = _PATIENCE
        while slots and patience:
            lease = next(iter(slots))
            if not self.settle(lease):
                slots[lease] = slots.pop(lease)
                patience -= 1

    def recall(self, lease: int) -> None:
        """Take a slot back whatever its byte says: for a borrower that is dead, or was never told."""
        self._table[lease] = 0
        self.settle(lease)


class BorrowedMemory:
    """The borrower's side: maps regions, and hands out views whose end ends their lease.

    ``arena`` says whether device memory may be among it, ``book`` how many leases last.
    """

    __slots__ = ("_segments", "_views", "arena", "book")

    def __init__(self, table: memoryview) -> None:
        compiled = native()
        book = LeaseBook if compiled is None else compiled.LeaseBook
        self.book: LeaseBook = book(table)
        self._views = self.book.views
        self._segments: dict[int, KnownSegment] = {}
        self.arena = False

    def announce(self, region: int, fd: int, size: int, home: str = "") -> None:
        """Map a region of some `Segment.home`; takes over ``fd``. May raise BridgeError."""
        segment = Segment.open(region, fd, size, home, writable=not is_read_only(region))
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
        """Return whether a region is mapped, or known without a mapping."""
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

        Raises MalformedMessage for a region that is not known, a place outside of it, or no lease.
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
        """Return tensors, of a class with ``_received``, of the bytes at places; raises as `views`.

        - ``placed``: whether they know their places, and so can be handed on.
        - ``read_only``: whether who looks at them may not write.
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
