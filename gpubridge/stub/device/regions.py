"""Device memory of others that a stub has open: each region once, until nobody uses it any more."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any, Callable, Optional

from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment, SharedEvents
from gpubridge.cuda_ipc.driver import HANDLE_BYTES
from gpubridge.errors import ErrorCode
from gpubridge.transport.channel import Channel, close_all
from gpubridge.transport.device_events import reserve_addresses
from gpubridge.transport.messages import Kind, control_message, decode_control

_Closing = tuple[DeviceSegment, Optional[SharedEvents], int]


class ArenaOffers:
    """The offers of one server to one stub that has heard nothing else; owns their descriptors.

    ``fields`` of the offer now, None for a stub without a device: ``region``, ``size``, ``handle``
    (empty where there is a descriptor), or a ``reason`` why nothing is offered; ``events``,
    ``no_events``, ``uuid`` and ``server``, the server's process id.
    """

    def __init__(self, channel: Channel, fields: dict[str, Any] | None, fds: list[int]) -> None:
        self._channel = channel
        self.fields = fields
        self._fds = fds
        self._early: list[tuple[bytes, list[int]]] = []

    def take_fds(self) -> list[int]:
        """Return the descriptors of the offer, which are the caller's now."""
        fds, self._fds = self._fds, []
        return fds

    def refuse(self, reason: str) -> None:
        """Say that the memory cannot be opened; `fields` are those of the next offer on return."""
        self.close()
        self._channel.send(control_message(Kind.ARENA_REFUSED, reason=reason))
        while True:
            message, fds = self._channel.receive()
            if message[0] == Kind.ARENA:
                self.fields, self._fds = decode_control(message), fds
                return
            # Another stub of the model may have completed its configuration meanwhile.
            self._early.append((message, fds))

    def next_message(self) -> tuple[bytes, list[int]]:
        """Return the server's next message, as `Channel.receive` does."""
        return self._early.pop(0) if self._early else self._channel.receive()

    def close(self) -> None:
        """Close descriptors that nobody has taken."""
        close_all(self.take_fds())


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

    - ``tell_closed``: tells the server that a region was closed, and how many announcements of it
      had come by then.
    - ``reason``: why nobody else can have the stub's own arena open; empty if others can.
    - ``no_events``: why nobody can wait for what is in it by events; empty if others can.
    """

    def __init__(
        self, context: DeviceContext, offers: ArenaOffers, tell_closed: Callable[[int, int], None]
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
            self._tell_closed(segment.region, announcements)
