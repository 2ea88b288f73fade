"""A slot of memory with several holders."""

from __future__ import annotations

from gpubridge.host_shm import HostArena, Slot

__all__ = ["SharedSlot"]


class SharedSlot:
    """A slot that goes back to its arena when nobody refers to this object any more."""

    __slots__ = ("_arena", "slot")

    def __init__(self, arena: HostArena, slot: Slot) -> None:
        self._arena = arena
        self.slot = slot

    def __del__(self) -> None:
        self._arena.free(self.slot)
