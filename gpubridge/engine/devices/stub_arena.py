"""The device memory that one stub hands tensors on from: made as the stub asks for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.engine.devices.arena_events import ArenaEvents
from gpubridge.engine.devices.region import DeviceRegion
from gpubridge.errors import BridgeError, ErrorCode, unavailable
from gpubridge.transport.device_events import arena_region

if TYPE_CHECKING:
    from gpubridge.cuda_ipc import DeviceInfo
    from gpubridge.engine.devices.memory import DeviceMemory
    from gpubridge.engine.stub_connection import StubConnection

_ROUNDED = 2 << 20
"""Bytes by which the driver rounds a segment up at most."""


class StubArena:
    """Makes the segments of one stub's arena.

    - ``devices``: allocates them.
    - ``device``: the stub's GPU.
    - ``link``: the connection to the stub, which knows the segments and holds them.
    - ``instance``: the name of the stub's instance.
    """

    def __init__(
        self, devices: DeviceMemory, device: DeviceInfo, link: StubConnection, instance: str
    ) -> None:
        self._devices = devices
        self._device = device
        # As long as the stub lives: the two hold each other.
        self._link: StubConnection | None = link
        self._instance = instance
        self._made = 0
        self._sizes: dict[int, int] = {}
        # By what the stub was offered memory last, and why it could not open it: by descriptors?
        self._by_fd = False
        self._refusals: dict[bool, str] = {}

    async def offer(self, nbytes: int, refused: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Make a segment; returns what the stub is told of it, and descriptors, which stay its own.

        The events of the stub come with the first. ``refused``: why the stub could not open what it
        was offered before.

        Raises BridgeError: UNAVAILABLE beyond the limit, or without memory; INTERNAL when the driver
        fails.
        """
        link = self._link
        if link is None:
            raise unavailable("the stub is gone")
        # It may have closed others.
        link.catch_up()
        if refused:
            self._refusals[self._by_fd] = refused
            self._devices.sharing.doubt(self._device.uuid, self._by_fd)
        limit = self._devices.arena_bytes + _ROUNDED
        if sum(self._sizes.values()) + nbytes > limit:
            raise unavailable(f"expected at most {limit} bytes of device memory, got {nbytes} more")
        region = arena_region(link.owner) + self._made
        self._made += 1
        first = not self._sizes
        # From now on, however many are asked for at once.
        self._sizes[region] = nbytes
        try:
            made, no_events = await self._devices.run(
                partial(self._allocate, region, nbytes, first=first)
            )
        except BridgeError as error:
            del self._sizes[region]
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            # The stub can use its GPU all the same, alone.
            return {"reason": error.message}, ()
        self._by_fd = bool(made.fds)
        link.give_segment(made, first=first)
        self._sizes[region] = made.size
        self._devices.note_arena(made)
        return {**made.described(), "no_events": no_events, "reason": ""}, made.fds

    def close(self) -> None:
        """The stub is gone."""
        self._link = None

    def closed(self, region: int) -> None:
        """The stub has given a segment back."""
        self._sizes.pop(region, None)

    def _allocate(self, region: int, nbytes: int, *, first: bool) -> tuple[DeviceRegion, str]:
        """Make a segment, the first with events; says why it has none."""
        devices = self._devices
        context = devices.context(self._device)
        segment = devices.sharing.allocate(context, region, nbytes, self._refusals)
        made, reason = None, ""
        try:
            if first:
                made, reason = ArenaEvents.create(context, self._instance)
        except BridgeError:
            devices.free(segment)
            raise
        handed_on = partial(devices.events.need, self._device.uuid)
        return DeviceRegion(segment, devices.free, made, handed_on), reason
