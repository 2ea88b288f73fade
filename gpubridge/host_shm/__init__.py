"""Host memory that several processes map: sealed memfd segments and the arenas cut from them."""

from gpubridge.host_shm.arena import HostArena, Slot
from gpubridge.host_shm.segment import Segment

__all__ = ["HostArena", "Segment", "Slot"]
