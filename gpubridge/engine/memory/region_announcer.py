"""Announcement of regions to stubs, and the device regions that stubs have open."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpubridge.engine.memory.device_region import ClientDeviceSegment, DeviceRegion
from gpubridge.engine.memory.regions import Regions, RegionUser
from gpubridge.host_shm import ClientSegment, Segment
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.leases import is_read_only, read_only_id
from gpubridge.transport.messages import Kind, control_message

_Segment = Segment | ClientSegment | DeviceRegion | ClientDeviceSegment


class OpenDeviceRegions:
    """References to the device memory that a stub has open, or will have.

    The stub reports a closed region with the number of announcements that it had received: another
    announcement may be on its way.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[DeviceRegion | ClientDeviceSegment, int]] = {}

    def announced(self, segment: DeviceRegion | ClientDeviceSegment) -> None:
        """Note that a region is announced to the stub once more."""
        _, times = self._held.get(segment.region, (None, 0))
        self._held[segment.region] = segment, times + 1

    def closed(self, region: int, announcements: int) -> bool:
        """Record a closed region; return whether no announcement is on its way; raises MalformedMessage."""
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
        """Drop all references: the stub is dead."""
        self._held.clear()


class RegionAnnouncer:
    """Announces each region through one channel of a stub, before the first message that refers to it.

    - ``kinds``: `Kind` or `CallKind`: the message kinds of the channel.
    - ``send``: sends a message and descriptors, which remain the caller's.

    Attribute ``known``: the regions that were announced through this channel.
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
        """Return the id of a region for references, after announcing the region if need be.

        ``read_only``: map host memory of the server or a stub read-only, as other models may still
        read it.
        """
        region = segment.region
        if read_only and isinstance(segment, Segment):
            region = read_only_id(region)
        if region not in self.known:
            self._announce(segment, region)
        return region

    def announce(self, segment: _Segment) -> None:
        """Announce a region that is not `known` yet and that the stub may write to."""
        self._announce(segment, segment.region)

    def _announce(self, segment: _Segment, region: int) -> None:
        self._send_region(segment, region)
        # After a successful send: a failed announcement must be repeated.
        self.known.add(region)
        self._regions.join(region, self._user)
        if isinstance(segment, Segment) and not is_read_only(region):
            self._regions.pin(segment, self._user)

    def _send_region(self, segment: _Segment, region: int) -> None:
        if isinstance(segment, (DeviceRegion, ClientDeviceSegment)):
            self._opened.announced(segment)
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

    def announce_all(
        self, segments: Iterable[ClientSegment | ClientDeviceSegment], device: str | None
    ) -> None:
        """Announce those regions that are not `known` yet to the stub, which is on ``device``.

        Regions on other GPUs are skipped: the server copies their tensors.
        """
        for segment in segments:
            on_other_gpu = isinstance(segment, ClientDeviceSegment) and segment.uuid != device
            if segment.region not in self.known and not on_other_gpu:
                self.announce(segment)

    def drop(self, region: int) -> None:
        """Make the stub unmap a `known` region."""
        self.known.discard(region)
        self._send(control_message(self._kinds.DROP_REGION, region=region))

    def close(self) -> None:
        """Deregister from all regions: the stub is dead."""
        self._regions.leave(self._user, self.known)
        # Break the cycle with the user, so that a dead stub's memory is freed now.
        del self._user, self._send
