"""Device memory regions that stubs open, and when they are freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.cuda_ipc import DeviceSegment
from gpubridge.host_shm import ClientSegment
from gpubridge.transport.device_events import reserve_addresses

if TYPE_CHECKING:
    from gpubridge.engine.devices.stub_arena import StubArenaEvents


class Closable(Protocol):
    """A resource with ``close``: device memory, events, an endpoint."""

    def close(self) -> None:
        """Release it; raises BridgeError."""


def _nothing() -> None:
    pass


class DeviceRegion:
    """A segment of a stub's device arena, or of the server's.

    The memory is freed with the last reference to this object. The connection of each stub that has
    the region open keeps a reference until the stub closes the region or dies.

    - ``view``: reserved addresses that represent it in lease books.
    - ``handle``: legacy IPC handle; empty if other processes open it by ``fds``.
    - ``pointer``: address in the server's process.
    - ``events``: events that mark the completion of tensors here; None if the stub waits itself.
    - ``handed_on``: called when the region is announced to another stub.
    """

    def __init__(
        self,
        segment: DeviceSegment,
        free: Callable[[Closable], None],
        events: StubArenaEvents | None = None,
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
        """Return the descriptor by which other processes open it, if any; owned by this object."""
        return self._segment.fds

    def described(self) -> dict[str, Any]:
        """Return the fields of its announcement to a stub."""
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
    """A client's device memory. The server keeps it open, so that the handle stays valid as checked.

    It is closed with the last reference to this object.

    - ``opened``: the open memory, taken over.
    - ``close``: closes it, later, on the driver thread.

    Attribute ``uuid``: the GPU.
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
        """Return the fields of its announcement to a stub."""
        return {
            "region": self.region,
            "size": self.size,
            "handle": self.handle.hex(),
            "events": "",
            "uuid": self.uuid,
            "client": True,
        }

    def has(self, end: int) -> bool:
        """Return whether it has ``end`` bytes; device memory is never resized."""
        return end <= self.size

    def __del__(self) -> None:
        self._close(self._opened)


OF_CLIENTS = (ClientSegment, ClientDeviceSegment)


ON_DEVICE = (DeviceRegion, ClientDeviceSegment)
