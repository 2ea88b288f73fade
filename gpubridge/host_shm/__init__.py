"""Host memory that several processes map: sealed memfd segments, arenas cut from them, clients' own."""

from gpubridge.host_shm.arena import HostArena, Slot
from gpubridge.host_shm.client_region import ClientMapping, ClientSegment
from gpubridge.host_shm.request_arena import MemoryLimit, RequestArena
from gpubridge.host_shm.segment import Segment

__all__ = [
    "ClientMapping",
    "ClientSegment",
    "HostArena",
    "MemoryLimit",
    "RequestArena",
    "Segment",
    "Slot",
]
