"""Memory that goes from one model to another: who may write to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpubridge.host_shm import Segment
from gpubridge.request import MemoryRange

__all__ = ["for_others", "is_shared", "shared_extras"]

_SHARED = b'"shared":true'


def for_others(ranges: Iterable[MemoryRange], names: Collection[str]) -> bool:
    """Tell whether some of the ranges lie in memory that is meant for none of these models.

    Who is handed such memory gets it to read only.
    """
    for part in ranges:
        segment = part.segment
        if isinstance(segment, Segment) and segment.home and segment.home not in names:
            return True
    return False


def is_shared(extras: bytes) -> bool:
    """Tell whether the extras of a request say that others may look at its inputs, too."""
    return b'"shared"' in extras


def shared_extras(extras: bytes) -> bytes:
    """Return the extras of a request with the word that others may look at its inputs, too."""
    if is_shared(extras):
        return extras
    return b"{%b,%b" % (_SHARED, extras[1:]) if extras else b"{%b}" % _SHARED
