"""Host memory shared by processes: sealed memfd segments, arenas in them, and clients' regions."""

from gpubridge.host_shm.arena import HostArena, Slot
from gpubridge.host_shm.budget import (
    LARGE_BYTES,
    Account,
    Body,
    Budget,
    PrivateBytes,
)
from gpubridge.host_shm.client_region import ClientMapping, ClientSegment, map_client_region
from gpubridge.host_shm.segment import Segment

__all__ = [
    "LARGE_BYTES",
    "Account",
    "Body",
    "Budget",
    "ClientMapping",
    "ClientSegment",
    "HostArena",
    "PrivateBytes",
    "Segment",
    "Slot",
    "map_client_region",
]
