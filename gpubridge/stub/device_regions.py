"""Device memory of others that a stub has open: each region once, until nobody uses it any more."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any, Callable

from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment
from gpubridge.errors import ErrorCode
from gpubridge.transport.device_regions import reserve_addresses

__all__ = ["DeviceRegions", "OpenedRegion"]

_OPEN = "cuIpcOpenMemHandle"


class OpenedRegion:
    """Device memory that this process has open; closed when nobody refers to it any more.

    Attributes
    ----------
    region, pointer, size : int
        Its id; where it lies here; bytes.
    view : memoryview
        Addresses that stand for it in lease books.
    client : bool
        Whether it is a client's.
    announcements : int
        How often the server has told of it.
    """

    __slots__ = (
        "__weakref__",
        "_closing",
        "announcements",
        "client",
        "pointer",
        "region",
        "segment",
        "size",
        "view",
    )

    def __init__(
        self, segment: DeviceSegment, client: bool, closing: deque[tuple[DeviceSegment, int]]
    ) -> None:
        self.segment = segment
        self.region = segment.region
        self.pointer = segment.pointer
        self.size = segment.size
        self.view = reserve_addresses(segment.size)
        self.client = client
        self.announcements = 0
        self._closing = closing

    def __del__(self) -> None:
        # Not here: this may be anywhere, and the driver waits for all work of the device.
        self._closing.append((self.segment, self.announcements))


class DeviceRegions:
    """The regions that this process has open.

    Parameters
    ----------
    context : DeviceContext
        Of the device that they are on.
    arena : dict
        Says which region is the stub's own: ``region``, ``size``, ``handle``, and ``server``, the
        server's process id, and ``reason``, why it cannot be opened.
    tell_closed : callable
        Tells the server that a region was closed, and how many announcements of it had come by then.

    Attributes
    ----------
    own : OpenedRegion
        The stub's arena.
    unshared : str
        Why nobody else can open the arena; empty if others can.
    """

    def __init__(
        self,
        context: DeviceContext,
        arena: dict[str, Any],
        tell_closed: Callable[[int, int], None],
    ) -> None:
        self._context = context
        self._tell_closed = tell_closed
        self._closing: deque[tuple[DeviceSegment, int]] = deque()
        self._known: weakref.WeakValueDictionary[int, OpenedRegion] = weakref.WeakValueDictionary()
        region, size = arena["region"], arena["size"]
        self.unshared = arena["reason"]
        segment = None if self.unshared else self._open_shared(arena)
        if segment is None:
            segment = DeviceSegment.allocate(context, region, size, shared=False)
        self.own = OpenedRegion(segment, False, self._closing)
        self._known[region] = self.own

    def _open_shared(self, arena: dict[str, Any]) -> DeviceSegment | None:
        """Open the arena that the server has made; None, and why, where that cannot be."""
        if arena["server"] == os.getpid():
            self.unshared = "the server's process cannot open what is its own"
            return None
        handle = bytes.fromhex(arena["handle"])
        try:
            return DeviceSegment.open(self._context, arena["region"], handle, arena["size"])
        except CudaError as error:
            if error.call != _OPEN or error.sticky or error.code == ErrorCode.UNAVAILABLE:
                raise
            self.unshared = error.message
            return None

    def announce(self, fields: dict[str, Any]) -> OpenedRegion:
        """Open a region that the server tells of, unless it is open.

        Raises
        ------
        BridgeError
            As the driver says.
        """
        opened = self._known.get(fields["region"])
        if opened is None:
            # It may be one that is about to be closed, and nothing can be open twice.
            self.close_unused()
            segment = DeviceSegment.open(
                self._context,
                fields["region"],
                bytes.fromhex(fields["handle"]),
                fields["size"],
            )
            opened = OpenedRegion(segment, fields["client"], self._closing)
            self._known[opened.region] = opened
        opened.announcements += 1
        return opened

    def get(self, region: int) -> OpenedRegion | None:
        """Return a region of the device; None for one that is in host memory, or closed."""
        return self._known.get(region)

    def close_unused(self) -> None:
        """Close the regions that nobody uses any more."""
        while self._closing:
            segment, announcements = self._closing.popleft()
            segment.close()
            self._tell_closed(segment.region, announcements)
