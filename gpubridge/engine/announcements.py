"""Regions announced to a stub: through which channel, and which may still be open there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpubridge.engine.devices.region import ClientDeviceSegment, DeviceRegion
from gpubridge.engine.regions import Regions, RegionUser
from gpubridge.host_shm import ClientSegment, Segment
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import is_read_only, read_only_id
from gpubridge.transport.messages import Kind, control_message

_Segment = Segment | ClientSegment | DeviceRegion | ClientDeviceSegment


class OpenDeviceRegions:
    """The device memory that a stub has open, or will: none of it may be freed before it is closed.

    The stub says when it has closed a region, and how many announcements it had taken by then:
    another may be on its way to it.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[DeviceRegion | ClientDeviceSegment, int]] = {}

    def told(self, segment: DeviceRegion | ClientDeviceSegment) -> None:
        """The stub is told of a region once more."""
        _, times = self._held.get(segment.region, (None, 0))
        self._held[segment.region] = segment, times + 1

    def closed(self, region: int, announcements: int) -> bool:
        """The stub has closed a region; returns whether for good. Raises MalformedMessage."""
        segment, times = self._held.get(region, (None, 0))
        if segment is None or announcements > times:
            raise MalformedMessage(
                f"device region {region:#x} closed after {announcements} announcements of {times}"
            )
        if announcements < times:
            self._held[region] = segment, times - announcements
            return False
        del self._held[region]
        return True

    def close(self) -> None:
        """The stub is gone, and with it all that it had open."""
        self._held.clear()


class Announcements:
    """Tells a stub, through one of its channels, of each region before the first message that names it.

    - ``kinds``: `Kind` or `CallKind`: how the messages of the channel are called.
    - ``send``: sends a message and descriptors, which stay the caller's.

    Attribute ``known``: the regions that the stub knows by this channel.
    """

    def __init__(
        self,
        kinds: type[Kind | CallKind],
        regions: Regions,
        user: RegionUser,
        opened: OpenDeviceRegions,
        send: Callable[..., None],
    ) -> None:
        self._kinds = kinds
        self._regions = regions
        self._user = user
        self._opened = opened
        self._send = send
        self.known: set[int] = set()

    def name(self, segment: _Segment, *, read_only: bool) -> int:
        """Return the id by which a reference names a region; the stub has been told of it then.

        Host memory of the bridge's own that others may still look at is mapped to be read only.
        """
        region = segment.region
        if read_only and isinstance(segment, Segment):
            region = read_only_id(region)
        if region not in self.known:
            self._tell(segment, region)
        return region

    def tell(self, segment: _Segment) -> None:
        """Tell the stub of a region that is not `known` yet, and that it may write to."""
        self._tell(segment, segment.region)

    def _tell(self, segment: _Segment, region: int) -> None:
        self._send_region(segment, region)
        # Not before: what was not sent has to be told again.
        self.known.add(region)
        self._regions.join(region, self._user)
        if isinstance(segment, Segment) and not is_read_only(region):
            self._regions.pin(segment, self._user)

    def _send_region(self, segment: _Segment, region: int) -> None:
        if isinstance(segment, (DeviceRegion, ClientDeviceSegment)):
            self._opened.told(segment)
            fds: tuple[int, ...] = ()
            if isinstance(segment, DeviceRegion):
                fds = segment.fds
                segment.handed_on()
            message = control_message(self._kinds.DEVICE_REGION, **segment.described())
            self._send(message, fds)
            return
        client = isinstance(segment, ClientSegment)
        message = control_message(
            self._kinds.REGION, region=region, size=segment.size, client=client
        )
        if isinstance(segment, Segment) and is_read_only(region):
            self._send(message, (segment.read_only_fd,))
            return
        self._send(message, (segment.fd,))

    def tell_all(
        self, segments: Iterable[ClientSegment | ClientDeviceSegment], device: str | None
    ) -> None:
        """Tell the stub, which is on ``device``, of those that are not `known` yet.

        What lies on another GPU is brought to it in other ways.
        """
        for segment in segments:
            far = isinstance(segment, ClientDeviceSegment) and segment.uuid != device
            if segment.region not in self.known and not far:
                self.tell(segment)

    def drop(self, region: int) -> None:
        """Have the stub unmap a region that it is `known` to know."""
        self.known.discard(region)
        self._send(control_message(self._kinds.DROP_REGION, region=region))

    def close(self) -> None:
        """The stub is gone."""
        self._regions.leave(self._user, self.known)
        # The user holds this: what a dead stub had mapped shall not wait for the collector.
        del self._user, self._send
