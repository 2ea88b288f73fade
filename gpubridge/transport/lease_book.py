"""The borrower's book of leases: which views exist under each, so that a lease ends with the last.

There are two of one behaviour: the compiled module's, and the one here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpubridge.tensor.native import native
from gpubridge.transport.control import NO_LEASE

if TYPE_CHECKING:
    from gpubridge.tensor.native import NativeLeaseBook

__all__ = ["LeaseBook", "lease_book"]


def lease_book(table: memoryview) -> NativeLeaseBook:
    """Open a book that writes the end of each lease to ``table``, a byte for each."""
    compiled = native()
    return (
        cast("NativeLeaseBook", LeaseBook(table)) if compiled is None else compiled.LeaseBook(table)
    )


class _View(weakref.ref):  # type: ignore[type-arg]
    """Watches one view of lent memory; knows its lease and size."""

    __slots__ = ("lease", "nbytes")
    lease: int
    nbytes: int


class LeaseBook:
    """The book in Python.

    Parameters
    ----------
    table : memoryview
        A byte for each lease; cleared when the lease ends.

    Attributes
    ----------
    held_bytes : int
        Bytes of all views that exist.
    """

    __slots__ = ("_arrays", "_leases", "_table", "held_bytes")

    def __init__(self, table: memoryview) -> None:
        self.held_bytes = 0
        self._table = table
        self._arrays: dict[int, Any] = {}
        self._leases: dict[int, list[_View]] = {}

    @property
    def held(self) -> int:
        """How many leases last, because views under them exist."""
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
        """Return the bytes at places given as (region, offset, nbytes, lease).

        Raises
        ------
        ValueError
            When a place does not exist.
        """
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
        """Return tensors of the bytes at places, by specs and shapes: what the tensor's class makes of them.

        Raises
        ------
        ValueError
            When a place does not exist.
        """
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
