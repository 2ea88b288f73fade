"""A client's CUDA memory: opened and checked by the server, opened by each stub of that device."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.cuda_ipc import ClientDeviceRegion

__all__ = ["ClientDeviceSegment"]


class ClientDeviceSegment:
    """A client's device memory, which the server has open, so that it is what it was checked to be.

    Closed when nobody refers to this object any more.

    Parameters
    ----------
    opened : ClientDeviceRegion
        Owned from now on.
    region : int
        The id by which every process knows this memory.
    handle : bytes
        As the client gave it.
    close : callable
        Closes it, in time, on the thread that calls the driver.

    Attributes
    ----------
    size : int
        Bytes that may be used.
    uuid : str
        The device.
    pointer : int
        In the server's own addresses.
    """

    __slots__ = (
        "__weakref__",
        "_close",
        "_opened",
        "handle",
        "pointer",
        "region",
        "size",
        "uuid",
    )

    def __init__(
        self,
        opened: ClientDeviceRegion,
        region: int,
        handle: bytes,
        close: Callable[[ClientDeviceRegion], None],
    ) -> None:
        self._opened = opened
        self._close = close
        self.region = region
        self.size = opened.size
        self.uuid = opened.uuid
        self.handle = handle
        self.pointer = opened.pointer

    def has(self, end: int) -> bool:
        """Whether there are so many bytes: device memory is never resized."""
        return end <= self.size

    def __del__(self) -> None:
        self._close(self._opened)
