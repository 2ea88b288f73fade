"""A client's CUDA memory: opened and checked by the server, opened by each stub of that device."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.cuda_ipc import DeviceSegment

__all__ = ["ClientDeviceSegment"]


class ClientDeviceSegment:
    """A client's device memory, which the server has open, so that it is what it was checked to be.

    Parameters
    ----------
    segment : DeviceSegment
        Opened; owned from now on.
    close : callable
        Closes it, in time, on the thread that calls the driver.

    Attributes
    ----------
    region, size : int
        The id by which every process knows this memory; bytes that may be used.
    uuid : str
        The device.
    handle : bytes
        As the client gave it.
    pointer : int
        In the server's own addresses.
    """

    __slots__ = ("_close", "_segment", "handle", "pointer", "region", "size", "uuid")

    def __init__(self, segment: DeviceSegment, close: Callable[[DeviceSegment], None]) -> None:
        self._segment = segment
        self._close = close
        self.region = segment.region
        self.size = segment.size
        self.uuid = segment.uuid
        self.handle = segment.handle
        self.pointer = segment.pointer

    def __del__(self) -> None:
        self._close(self._segment)
