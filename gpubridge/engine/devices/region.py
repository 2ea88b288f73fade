"""Device memory of the server that stubs open: whose it is, and when it is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpubridge.cuda_ipc import DeviceSegment
from gpubridge.engine.devices.arena_events import ArenaEvents
from gpubridge.transport.device_regions import reserve_addresses

__all__ = ["Closable", "DeviceRegion"]


class Closable(Protocol):
    """Device memory of any kind."""

    def close(self) -> None:
        """Free or close it; raises BridgeError."""


class DeviceRegion:
    """A stub's arena, as the server and its ledgers see it.

    The memory is freed when nobody refers to this object any more: each link whose stub has it open
    does until the stub says that it has closed it, or is gone.

    Attributes
    ----------
    region, size : int
        The id by which every process knows this memory; bytes.
    view : memoryview
        Addresses that stand for it in lease books.
    uuid : str
        The device.
    handle : bytes
        By which other processes open it; empty where they do that by ``fds``.
    pointer : int
        In the server's own addresses.
    events : ArenaEvents or None
        By which the stub says when what lies here is complete; None where it waits itself.
    """

    __slots__ = (
        "__weakref__",
        "_free",
        "_segment",
        "events",
        "handle",
        "pointer",
        "region",
        "size",
        "uuid",
        "view",
    )

    def __init__(
        self,
        segment: DeviceSegment,
        free: Callable[[Closable], None],
        events: ArenaEvents | None = None,
    ) -> None:
        self._segment = segment
        self._free = free
        self.events = events
        self.region = segment.region
        self.size = segment.size
        self.uuid = segment.uuid
        self.handle = segment.handle
        self.pointer = segment.pointer
        self.view = reserve_addresses(segment.size)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor by which they open it otherwise; this object's."""
        return self._segment.fds

    def __del__(self) -> None:
        if self.events is not None:
            self._free(self.events)
        self._free(self._segment)
