"""Device memory that a stub has open: each region once, until nobody uses it any more."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Callable, Optional

from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment, SharedEvents
from gpubridge.cuda_ipc.driver import HANDLE_BYTES
from gpubridge.transport.channel import close_all
from gpubridge.transport.device_events import arena_region, reserve_addresses

_PRIVATE = 1 << 29
"""In the lower half of an arena's id, above those that the server gives."""

_Closing = tuple[DeviceSegment, Optional[SharedEvents], int]


class OpenedRegion:
    """Device memory that this process has open; closed when nobody refers to it any more.

    ``view`` stands for it in lease books; ``announcements`` counts how often the server has told of
    it; by ``events``, if any, whoever fills it says what is complete.
    """

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

    - ``context``: gives the context of the device, which is made at first need.
    - ``owner``: the upper half of the ids of regions that are made here.
    - ``tell_closed``: tells the server that a region was closed, and how many announcements of it
      had come by then.
    - ``no_events``: why nobody can wait for events of a region; empty as far as others can.
    """

    def __init__(
        self,
        context: Callable[[], DeviceContext],
        owner: int,
        tell_closed: Callable[[int, int], None],
    ) -> None:
        self._context = context
        self._owner = owner
        self.tell_closed = tell_closed
        self._closing: deque[_Closing] = deque()
        self._known: weakref.WeakValueDictionary[int, OpenedRegion] = weakref.WeakValueDictionary()
        self._private = 0
        self.no_events = ""

    def _open(self, fields: dict[str, Any], fds: list[int]) -> DeviceSegment:
        """Open memory, by its descriptor if there is one; closes that."""
        region, size = fields["region"], fields["size"]
        try:
            context = self._context()
            if fds:
                return DeviceSegment.open_fd(context, region, fds[0], size)
            return DeviceSegment.open(context, region, bytes.fromhex(fields["handle"]), size)
        finally:
            close_all(fds)

    def _open_events(self, fields: dict[str, Any]) -> SharedEvents | None:
        self.no_events = fields.get("no_events") or self.no_events
        raw = bytes.fromhex(fields["events"])
        if not raw:
            return None
        handles = [raw[at : at + HANDLE_BYTES] for at in range(0, len(raw), HANDLE_BYTES)]
        try:
            return SharedEvents.open(self._context(), handles)
        except CudaError as error:
            if error.sticky:
                raise
            self.no_events = error.message
            return None

    def make_private(self, nbytes: int) -> OpenedRegion:
        """Allocate memory that no other process can have open."""
        region = arena_region(self._owner) + _PRIVATE + self._private
        segment = DeviceSegment.private(self._context(), region, nbytes)
        self._private += 1
        opened = self._known[region] = OpenedRegion(segment, None, False, self._closing)
        return opened

    def announce(self, fields: dict[str, Any], fds: list[int]) -> OpenedRegion:
        """Open a region that the server tells of, unless it is open; closes the descriptors."""
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
            if announcements:
                self.tell_closed(segment.region, announcements)
