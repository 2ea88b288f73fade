"""Events that tensors on a GPU wait for, as fields of the contexts of records.

In a stub's record, ``event`` names the event of its own arena whose completion completes all device
tensors of the record, and ``event_lease`` the lease of that event; without it, only the events of the
lenders count. In the server's records, ``waits`` lists the events of the tensors: runs of (region of
the arena, event, number of tensors), with event -1 for complete tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import CallContext, RequestContext, ResponseContext

if TYPE_CHECKING:
    from typing import Union

    FromStub = Union[CallContext, ResponseContext]
    FromServer = Union[RequestContext, ResponseContext]

_COMPLETE = -1
S = TypeVar("S", RequestContext, ResponseContext)
_ARENA = 1 << 31
"""Bit in the lower half of an arena's region id; regions of output memory count from 1."""

_MAP_NORESERVE = 0x4000
"""MAP_NORESERVE, which the mmap module lacks before Python 3.13."""


def event_of(context: FromStub, count: int) -> tuple[int, int] | None:
    """Return the event of a stub's record and its lease, or None; may raise MalformedMessage."""
    event, lease = context.event, context.event_lease
    if event is None:
        return None
    if event >= count or lease is None:
        raise MalformedMessage(f"event {event} under lease {lease} of a stub that has {count}")
    return event, lease


def with_waits(context: S, waits: Sequence[tuple[int, int] | None]) -> S:
    """Return a server record's context with each tensor's event, (region, number) or None."""
    runs: list[list[int]] = []
    for wait in waits:
        region, number = wait or (0, _COMPLETE)
        if runs and runs[-1][:2] == [region, number]:
            runs[-1][2] += 1
        else:
            runs.append([region, number, 1])
    if all(run[1] == _COMPLETE for run in runs):
        return context
    return context.changed(waits=runs)


def waits_of(context: FromServer) -> list[tuple[int, int] | None] | None:
    """Return the event of each tensor of a server's record; None if no tensor waits."""
    if context.waits is None:
        return None
    waits: list[tuple[int, int] | None] = []
    for region, number, count in context.waits:
        waits += [None if number == _COMPLETE else (region, number)] * count
    return waits


def arena_region(owner: int) -> int:
    """Return the region id of a process's device arena."""
    return owner << 32 | _ARENA


def event_name(region: int, number: int) -> int:
    """Return the name of an event among all stubs; ``region``: any region of its owner."""
    return arena_region(region >> 32) | number


def is_arena(region: int) -> bool:
    """Return whether a region is a device arena."""
    return region & _ARENA != 0


def reserve_addresses(size: int) -> memoryview:
    """Reserve ``size`` bytes of addresses without memory; returns a view that owns them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return memoryview(mmap.mmap(-1, size, flags=flags))
