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
        Says which region is the stub's own: ``region``, ``size``, ``handle`` (empty, with a
        ``reason``, where there is none), and ``server``, the server's process id.
    tell_closed : callable
        Tells the server that a region was closed, and how many announcements of it had come by then.

    Attributes
    ----------
    own : OpenedRegion
        The stub's arena.
    reason : str
        Why nobody else can have that open; empty if others can.
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
        self.reason: str = arena["reason"]
        self.own = OpenedRegion(self._open_own(arena), False, self._closing)
        self._known[self.own.region] = self.own

    def _open_own(self, arena: dict[str, Any]) -> DeviceSegment:
        context, region, size = self._context, arena["region"], arena["size"]
        if arena["server"] == os.getpid():
            self.reason = "the model runs in its server's process"
        elif arena["handle"]:
            try:
                return DeviceSegment.open(context, region, bytes.fromhex(arena["handle"]), size)
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                self.reason = error.message
        return DeviceSegment.private(context, region, size)

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
