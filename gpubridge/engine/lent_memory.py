"""Slots of requests that several hold."""

from __future__ import annotations

from typing import Any

from gpubridge.transport.leases import SlotOwner


class SharedSlot:
    """A slot that goes back to its arena when nobody refers to this object any more."""

    __slots__ = ("_arena", "slot")

    def __init__(self, arena: SlotOwner, slot: Any) -> None:
        self._arena = arena
        self.slot = slot

    def __del__(self) -> None:
        self._arena.free(self.slot)
