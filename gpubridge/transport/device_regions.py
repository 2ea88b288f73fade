"""Device memory as the lease books see it: address space of the same size, where nothing ever lies.

A lease lasts as long as views under it exist, and views need addresses of the host. So each process
gives a region of device memory a range of its own addresses, which takes no memory, and whose views
are held beside the device pointers. Nobody reads or writes there.
"""

from __future__ import annotations

import mmap

__all__ = ["arena_region", "is_arena", "reserve_addresses"]

_ARENA = 1 << 31
"""In the lower half of an arena's region id: those of output memory begin with 1."""

_MAP_NORESERVE = 0x4000
"""The module has no name for it before Python 3.13."""


def arena_region(owner: int) -> int:
    """Return the id of the device arena of a maker of regions."""
    return owner << 32 | _ARENA


def is_arena(region: int) -> bool:
    """Whether a region is a device arena."""
    return region & _ARENA != 0


def reserve_addresses(size: int) -> memoryview:
    """Return ``size`` addresses with nothing behind them, as a writable view that owns them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return memoryview(mmap.mmap(-1, size, flags=flags))
