"""Memory that goes from one model to another: who may write to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpubridge.host_shm import Segment
from gpubridge.request import MemoryRange
from gpubridge.transport.context import RequestContext


def for_others(ranges: Iterable[MemoryRange], names: Collection[str]) -> bool:
    """Tell whether some of the ranges lie in memory that is meant for none of these models.

    Who is handed such memory gets it to read only.
    """
    for part in ranges:
        segment = part.segment
        if isinstance(segment, Segment) and segment.home not in names:
            return True
    return False


def shared(context: RequestContext) -> RequestContext:
    """Return the context of a request whose inputs others may look at, too."""
    return context if context.shared else context.changed(shared=True)
