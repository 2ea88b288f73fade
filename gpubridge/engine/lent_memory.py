"""The memory that is lent to a stub, found by the references that come back from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpubridge.dataplane import InFlightRequests
from gpubridge.errors import unavailable
from gpubridge.host_shm import HostArena
from gpubridge.request import NO_BYTES, MemoryRange
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import SlotOwner


class SharedSlot:
    """A slot that goes back to its arena when nobody refers to this object any more."""

    __slots__ = ("_arena", "slot")

    def __init__(self, arena: SlotOwner, slot: Any) -> None:
        self._arena = arena
        self.slot = slot

    def __del__(self) -> None:
        self._arena.free(self.slot)


def ranges_of(kept: object) -> Sequence[MemoryRange]:
    """Return the ranges that are lent under a ticket; none where a slot is."""
    return kept if isinstance(kept, (list, tuple)) else ()


class LentMemory:
    """Looks memory up by the ticket that it is lent under, and lends answers to calls.

    - ``in_flight``: knows what is lent; stays the caller's.
    - ``arena``: where slots go back to that several hold from now on.
    """

    __slots__ = ("_arena", "_in_flight")

    def __init__(self, in_flight: InFlightRequests, arena: HostArena) -> None:
        self._in_flight = in_flight
        self._arena = arena

    def find(self, ref: tuple[int, int, int, int]) -> MemoryRange:
        """Return memory that is lent to the stub, to hand it on.

        Raises MalformedMessage when it is not lent under that ticket.
        """
        region, offset, nbytes, ticket = ref
        if not nbytes:
            return NO_BYTES
        kept = self._in_flight.kept(ticket)
        if kept is None:
            slot = self._in_flight.slot(ticket)
            if slot is not None:
                kept = SharedSlot(self._arena, slot)
                self._in_flight.share(ticket, kept)
        end = offset + nbytes
        if isinstance(kept, SharedSlot):
            slot = kept.slot
            at = slot.offset
            if slot.segment.region == region and at <= offset and end <= at + slot.size:
                return MemoryRange(slot.segment, offset, nbytes, kept)
        else:
            for segment, at, size, keep in ranges_of(kept):
                if segment is None or segment.region != region:
                    continue
                if at <= offset and end <= at + size:
                    return MemoryRange(segment, offset, nbytes, keep)
        raise MalformedMessage(
            f"{nbytes} bytes at {offset} of region {region:#x} are not lent under ticket {ticket}"
        )

    def all_ranges(self) -> list[Sequence[MemoryRange]]:
        """Return whatever is lent that does not just lie in a request's slot."""
        return [ranges_of(kept) for kept in self._in_flight.all_kept()]

    def lend(self, ranges: Sequence[MemoryRange]) -> int:
        """Lend memory to the stub until its last view of it is gone; returns the ticket.

        Raises BridgeError: UNAVAILABLE when there is no ticket left.
        """
        ticket = self._in_flight.lend(ranges)
        if ticket is None:
            raise unavailable(
                f"the model holds the memory of {self._in_flight.lent_answers} answers to its calls: "
                "it must let go of some before it gets others"
            )
        return ticket
