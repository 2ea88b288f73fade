"""Device memory of the server that stubs open: whose it is, and when it is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gpubridge.cuda_ipc import DeviceSegment
from gpubridge.engine.devices.arena_events import ArenaEvents
from gpubridge.host_shm import ClientSegment
from gpubridge.transport.device_events import reserve_addresses


class Closable(Protocol):
    """Device memory of any kind."""

    def close(self) -> None:
        """Free or close it; raises BridgeError."""


def _nothing() -> None:
    pass


class DeviceRegion:
    """A segment of a stub's arena, or of the server's, as the server and its lease books see it.

    The memory is freed when nobody refers to this object any more: each link whose stub has it open
    does until the stub says that it has closed it, or is gone.

    - ``view``: addresses that stand for it in lease books.
    - ``handle``: by which other processes open it; empty where they do that by ``fds``.
    - ``pointer``: in the server's own addresses.
    - ``events``: by which the stub says when what lies here is complete; None where it waits
      itself.
    - ``handed_on``: to be called when another stub is told of it.
    """

    def __init__(
        self,
        segment: DeviceSegment,
        free: Callable[[Closable], None],
        events: ArenaEvents | None = None,
        handed_on: Callable[[], None] = _nothing,
    ) -> None:
        self.handed_on = handed_on
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

    def described(self) -> dict[str, Any]:
        """Return what a stub is told of it, which may get descriptors with that."""
        return {
            "region": self.region,
            "size": self.size,
            "handle": self.handle.hex(),
            "events": "" if self.events is None else self.events.handles.hex(),
            "uuid": self.uuid,
            "client": False,
        }

    def __del__(self) -> None:
        if self.events is not None:
            self._free(self.events)
        self._free(self._segment)


class ClientDeviceSegment:
    """A client's device memory, which the server has open, so that it is what it was checked to be.

    Closed when nobody refers to this object any more.

    - ``opened``: owned from now on.
    - ``close``: closes it, in time, on the thread that calls the driver.

    Attribute ``uuid``: the device.
    """

    def __init__(
        self,
        opened: DeviceSegment,
        region: int,
        handle: bytes,
        close: Callable[[DeviceSegment], None],
    ) -> None:
        self._opened = opened
        self._close = close
        self.region = region
        self.size = opened.size
        self.uuid = opened.uuid
        self.handle = handle
        self.pointer = opened.pointer

    def described(self) -> dict[str, Any]:
        """Return what a stub is told of it."""
        return {
            "region": self.region,
            "size": self.size,
            "handle": self.handle.hex(),
            "events": "",
            "uuid": self.uuid,
            "client": True,
        }

    def has(self, end: int) -> bool:
        """Return whether there are so many bytes: device memory is never resized."""
        return end <= self.size

    def __del__(self) -> None:
        self._close(self._opened)


OF_CLIENTS = (ClientSegment, ClientDeviceSegment)


ON_DEVICE = (DeviceRegion, ClientDeviceSegment)
