"""Events that tensors on a GPU wait for, as fields of the contexts of records.

A stub's record says with ``event`` that all its tensors on the device are complete when that event of
its own arena has come to pass, and with ``event_lease`` under which lease it is lent; without it, they are
when the events of whoever has lent them to the stub are. The server's records say with ``waits`` what each
tensor waits for: runs of (arena's region, event, tensors), the event -1 for tensors that are complete.
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
"""In the lower half of an arena's region id: those of output memory begin with 1."""

_MAP_NORESERVE = 0x4000
"""The module has no name for it before Python 3.13."""


def event_of(context: FromStub, count: int) -> tuple[int, int] | None:
    """Return the event that a stub's record names, and its lease; or raise MalformedMessage."""
    event, lease = context.event, context.event_lease
    if event is None:
        return None
    if event >= count or lease is None:
        raise MalformedMessage(f"event {event} under lease {lease} of a stub that has {count}")
    return event, lease


def with_waits(context: S, waits: Sequence[tuple[int, int] | None]) -> S:
    """Return the context of a server's record whose tensors wait for (region, event), or for nothing."""
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
    """Return what each tensor of a server's record waits for; None where none waits for anything."""
    if context.waits is None:
        return None
    waits: list[tuple[int, int] | None] = []
    for region, number, count in context.waits:
        waits += [None if number == _COMPLETE else (region, number)] * count
    return waits


def arena_region(owner: int) -> int:
    """Return the id of the device arena of a maker of regions."""
    return owner << 32 | _ARENA


def event_name(region: int, number: int) -> int:
    """Return the name of an event among those of all stubs; ``region``: any that its maker made."""
    return arena_region(region >> 32) | number


def is_arena(region: int) -> bool:
    """Return whether a region is a device arena."""
    return region & _ARENA != 0


def reserve_addresses(size: int) -> memoryview:
    """Return ``size`` addresses with nothing behind them, as a writable view that owns them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return memoryview(mmap.mmap(-1, size, flags=flags))
