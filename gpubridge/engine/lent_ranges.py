"""The memory that is lent to a stub, found by the references that come back from it."""

from __future__ import annotations

from collections.abc import Sequence

from gpubridge.engine.shared_slot import SharedSlot
from gpubridge.host_shm import HostArena
from gpubridge.request import NO_BYTES, MemoryRange
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import LentSlots

__all__ = ["LentRanges"]


class LentRanges:
    """Looks memory up by the ticket that it is lent under.

    Parameters
    ----------
    lent : LentSlots
        What is lent; stays the caller's.
    arena : HostArena
        Where slots go back to that several hold from now on.
    """

    __slots__ = ("_arena", "_lent")

    def __init__(self, lent: LentSlots, arena: HostArena) -> None:
        self._lent = lent
        self._arena = arena

    def of(self, ticket: int) -> Sequence[MemoryRange]:
        """Return what is lent under a ticket that is no slot of a request."""
        kept = self._lent.kept(ticket)
        return kept if isinstance(kept, (list, tuple)) else ()

    def find(self, ref: tuple[int, int, int, int]) -> MemoryRange:
        """Return memory that is lent to the stub, to hand it on.

        Raises
        ------
        MalformedMessage
            When it is not lent under that ticket.
        """
        region, offset, nbytes, ticket = ref
        if not nbytes:
            return NO_BYTES
        slot = self._lent.slot(ticket)
        if slot is not None:
            shared = SharedSlot(self._arena, slot)
            self._lent.share(ticket, shared)
            kept: object = shared
        else:
            kept = self._lent.kept(ticket)
        end = offset + nbytes
        if isinstance(kept, SharedSlot):
            slot = kept.slot
            at = slot.offset
            if slot.segment.region == region and at <= offset and end <= at + slot.size:
                return MemoryRange(slot.segment, offset, nbytes, kept)
        else:
            for segment, at, size, keep in self.of(ticket):
                if segment is None or segment.region != region:
                    continue
                if at <= offset and end <= at + size:
                    return MemoryRange(segment, offset, nbytes, keep)
        raise MalformedMessage(
            f"{nbytes} bytes at {offset} of region {region:#x} are not lent under ticket {ticket}"
        )
