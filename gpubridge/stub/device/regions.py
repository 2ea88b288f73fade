"""Device memory of others that a stub has open: each region once, until nobody uses it any more."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any, Callable, Optional

from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment, SharedEvents
from gpubridge.cuda_ipc.driver import HANDLE_BYTES
from gpubridge.errors import ErrorCode
from gpubridge.stub.device.arena_offers import ArenaOffers
from gpubridge.transport.channel import close_all
from gpubridge.transport.device_regions import reserve_addresses

__all__ = ["DeviceRegions", "OpenedRegion"]


_Closing = tuple[DeviceSegment, Optional[SharedEvents], int]


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
    events : SharedEvents or None
        By which whoever fills it says what is complete; None where there are none.
    """

    __slots__ = (
        "__weakref__",
        "_closing",
        "announcements",
        "client",
        "events",
        "pointer",
        "region",
        "segment",
        "size",
        "view",
    )

    def __init__(
        self,
        segment: DeviceSegment,
        events: SharedEvents | None,
        client: bool,
        closing: deque[_Closing],
    ) -> None:
        self.segment = segment
        self.events = events
        self.region = segment.region
        self.pointer = segment.pointer
        self.size = segment.size
        self.view = reserve_addresses(segment.size)
        self.client = client
        self.announcements = 0
        self._closing = closing

    def __del__(self) -> None:
        # Not here: this may be anywhere, and the driver waits for all work of the device.
        self._closing.append((self.segment, self.events, self.announcements))


class DeviceRegions:
    """The regions that this process has open.

    Parameters
    ----------
    context : DeviceContext
        Of the device that they are on.
    offers : ArenaOffers
        Says which region is the stub's own.
    tell_closed : callable
        Tells the server that a region was closed, and how many announcements of it had come by then.

    Attributes
    ----------
    own : OpenedRegion
        The stub's arena.
    reason : str
        Why nobody else can have that open; empty if others can.
    no_events : str
        Why nobody can wait for what is in it by events; empty if others can.
    """

    def __init__(
        self,
        context: DeviceContext,
        offers: ArenaOffers,
        tell_closed: Callable[[int, int], None],
    ) -> None:
        self._context = context
        self._tell_closed = tell_closed
        self._closing: deque[_Closing] = deque()
        self._known: weakref.WeakValueDictionary[int, OpenedRegion] = weakref.WeakValueDictionary()
        self.reason = ""
        segment = self._open_own(offers)
        assert offers.fields is not None
        self.no_events: str = offers.fields["no_events"]
        events = None if self.reason else self._open_events(offers.fields)
        self.own = OpenedRegion(segment, events, False, self._closing)
        self._known[self.own.region] = self.own

    def _open_own(self, offers: ArenaOffers) -> DeviceSegment:
        while True:
            offered = offers.fields
            assert offered is not None
            self.reason = offered["reason"]
            if offered["server"] == os.getpid():
                self.reason = "the model runs in its server's process"
            if self.reason:
                return DeviceSegment.private(self._context, offered["region"], offered["size"])
            try:
                return self._open(offered, offers.take_fds())
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                offers.refuse(error.message)

    def _open(self, fields: dict[str, Any], fds: list[int]) -> DeviceSegment:
        """Open memory, by its descriptor if there is one; closes that."""
        region, size = fields["region"], fields["size"]
        try:
            if fds:
                return DeviceSegment.open_fd(self._context, region, fds[0], size)
            return DeviceSegment.open(self._context, region, bytes.fromhex(fields["handle"]), size)
        finally:
            close_all(fds)

    def _open_events(self, fields: dict[str, Any]) -> SharedEvents | None:
        raw = bytes.fromhex(fields["events"])
        if not raw:
            return None
        handles = [raw[at : at + HANDLE_BYTES] for at in range(0, len(raw), HANDLE_BYTES)]
        try:
            return SharedEvents.open(self._context, handles)
        except CudaError as error:
            if error.sticky:
                raise
            self.no_events = error.message
            return None

    def announce(self, fields: dict[str, Any], fds: list[int]) -> OpenedRegion:
        """Open a region that the server tells of, unless it is open; closes the descriptors.

        Raises
        ------
        BridgeError
            As the driver says.
        """
        opened = self._known.get(fields["region"])
        if opened is None:
            # It may be one that is about to be closed, and nothing can be open twice.
            self.close_unused()
            segment = self._open(fields, fds)
            events = self._open_events(fields)
            opened = OpenedRegion(segment, events, fields["client"], self._closing)
            self._known[opened.region] = opened
        else:
            close_all(fds)
        opened.announcements += 1
        return opened

    def get(self, region: int) -> OpenedRegion | None:
        """Return a region of the device; None for one that is in host memory, or closed."""
        return self._known.get(region)

    def close_unused(self) -> None:
        """Close the regions that nobody uses any more."""
        while self._closing:
            segment, events, announcements = self._closing.popleft()
            if events is not None:
                events.close()
            segment.close()
            self._tell_closed(segment.region, announcements)
