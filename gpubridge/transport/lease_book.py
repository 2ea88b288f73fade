"""Views of borrowed memory whose end ends their lease, for interpreters without the compiled module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpubridge.transport.control import NO_LEASE


class _View(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a view of lent memory, with its lease and size."""

    __slots__ = ("lease", "nbytes")
    lease: int
    nbytes: int


class LeaseBook:
    """Tracks all views of borrowed memory; the compiled module has an equivalent class.

    ``table`` has a byte for each lease, which is cleared when the lease ends; ``held_bytes`` is the
    size of all views.
    """

    __slots__ = ("_arrays", "_leases", "_table", "held_bytes")

    def __init__(self, table: memoryview) -> None:
        self.held_bytes = 0
        self._table = table
        self._arrays: dict[int, Any] = {}
        self._leases: dict[int, list[_View]] = {}

    @property
    def held(self) -> int:
        """Number of leases with existing views."""
        return len(self._leases)

    def add(self, region: int, memory: memoryview) -> None:
        """Add the memory of a region."""
        self._arrays[region] = np.frombuffer(memory, np.uint8)

    def remove(self, region: int) -> None:
        """Remove a region; existing views keep its memory."""
        self._arrays.pop(region, None)

    def forget(self, table: memoryview) -> None:
        """Use another table from now on."""
        self._table = table

    def views(self, refs: Sequence[tuple[int, int, int, int]]) -> Sequence[memoryview]:
        """Return views of references (region, offset, nbytes, lease); may raise ValueError."""
        if len(refs) > 1:
            region, start, size, lease = refs[0]
            end = start + size
            for ref in refs:
                if ref[0] != region or ref[3] != lease or ref[1] < start:
                    break
                end = max(end, ref[1] + ref[2])
            else:
                # The tensors of a record mostly share slot and lease: all views refer to one array.
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
        """Return tensors of class ``kind`` over views of references; raises as `views`."""
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
        # The weak reference is to an array that exports the bytes. It could not be to a memoryview:
        # a view of a view refers to the exporter only, and NumPy and uvloop make views of their own.
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
        # Any thread may delete the last view: each step here is atomic under the GIL.
        lease = watch.lease  # type: ignore[attr-defined]
        self.held_bytes -= watch.nbytes  # type: ignore[attr-defined]
        watches = self._leases[lease]
        watches.remove(watch)  # type: ignore[arg-type]
        if not watches:
            del self._leases[lease]
            self._table[lease] = 0
