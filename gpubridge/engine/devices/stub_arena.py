"""Device memory and events of one stub: allocated by the server when the stub asks for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.cuda_ipc import CudaError, DeviceContext, SharedEvents
from gpubridge.engine.memory.device_region import DeviceRegion
from gpubridge.errors import BridgeError, ErrorCode, unavailable
from gpubridge.transport.control import EVENTS
from gpubridge.transport.device_events import arena_region

if TYPE_CHECKING:
    from gpubridge.cuda_ipc import DeviceInfo
    from gpubridge.engine.devices.manager import DeviceManager
    from gpubridge.engine.ipc.stub_connection import StubConnection


_logger = logging.getLogger(__name__)


class StubArenaEvents:
    """Shared events by which a stub marks the completion of tensors that it has sent.

    The server creates them, so that they outlive the stub. ``shared``: taken over. ``instance``: the
    name of the stub's instance.
    """

    def __init__(self, shared: SharedEvents, uuid: str, instance: str) -> None:
        self._shared = shared
        self._uuid = uuid
        self.instance = instance
        self.handles = b"".join(shared.handles)
        self.count = len(shared.handles)

    @classmethod
    def create(cls, context: DeviceContext, instance: str) -> tuple[StubArenaEvents | None, str]:
        """Create events, on the driver thread; return None and the reason if they cannot be shared."""
        try:
            shared = SharedEvents.create(context, EVENTS)
        except CudaError as error:
            if error.sticky:
                raise
            return None, error.message
        return cls(shared, context.device.uuid, instance), ""

    def done(self, number: int) -> bool:
        """Return whether an event has completed; call on the driver thread."""
        return self._shared.done(number)

    @property
    def loss(self) -> str:
        """Return the error text for an event that never completes."""
        return (
            f"Stub process '{self.instance}' is not healthy. It died before the GPU work on the "
            "tensors that it had sent was complete; send the request again"
        )

    @property
    def end(self) -> str:
        """Return the error text for a stub that still waits for an event of this one, which has ended."""
        return f"That process was stub '{self.instance}', which has ended; send the request again"

    async def record_for_ended_stub(self, devices: DeviceManager, numbers: Sequence[int]) -> None:
        """Record events of a stub that has ended, so that streams waiting for them continue.

        Of those whose work was not complete, the data is undefined.
        """
        try:
            await devices.run(lambda: self._record(numbers, devices.stream(self._uuid).handle))
        except BridgeError as error:
            _logger.warning(
                "GPU streams that wait for stub '%s', which has ended, cannot be released: %s",
                self.instance,
                error.message,
            )

    def _record(self, numbers: Sequence[int], stream: int) -> None:
        for number in numbers:
            self._shared.record(number, stream)

    def close(self) -> None:
        """Destroy the events; call on the driver thread."""
        self._shared.close()


_ROUNDED = 2 << 20
"""Largest number of bytes by which the driver rounds a segment up."""


class StubArena:
    """Allocates the segments of one stub's arena when the stub asks for them.

    - ``devices``: allocates them.
    - ``device``: the stub's GPU.
    - ``connection``: the connection to the stub, which keeps the segments alive.
    - ``instance``: the name of the stub's instance.
    """

    def __init__(
        self, devices: DeviceManager, device: DeviceInfo, connection: StubConnection, instance: str
    ) -> None:
        self._devices = devices
        self._device = device
        # Reset when the stub dies, as the two refer to each other.
        self._connection: StubConnection | None = connection
        self._instance = instance
        self._made = 0
        self._sizes: dict[int, int] = {}
        # The last method offered (True: descriptors), and why the stub could not open memory by a method.
        self._by_fd = False
        self._refusals: dict[bool, str] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of its segments."""
        return sum(self._sizes.values())

    async def offer(self, nbytes: int, refused: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Allocate a segment; return its announcement and its descriptors, which it keeps owning.

        The first segment comes with the stub's events. ``refused``: why the stub could not open the
        previous segment.

        Raises BridgeError: UNAVAILABLE beyond the limit or without memory; INTERNAL when the driver
        fails.
        """
        connection = self._connection
        if connection is None:
            raise unavailable("the stub has ended")
        # The stub may have closed other segments.
        connection.catch_up()
        if refused:
            self._refusals[self._by_fd] = refused
            self._devices.sharing.mark_unusable(self._device.uuid, self._by_fd)
        limit = self._devices.arena_bytes + _ROUNDED
        if self.nbytes + nbytes > limit:
            raise unavailable(f"expected at most {limit} bytes of device memory, got {nbytes} more")
        region = arena_region(connection.owner) + self._made
        self._made += 1
        first = not self._sizes
        # Counted from now on, as requests may be concurrent.
        self._sizes[region] = nbytes
        try:
            made, no_events = await self._devices.run(
                partial(self._allocate, region, nbytes, first=first)
            )
        except BridgeError as error:
            del self._sizes[region]
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            # The stub can still use its GPU, but sends tensors in host memory.
            return {"reason": error.message}, ()
        self._by_fd = bool(made.fds)
        connection.add_segment(made, first=first)
        self._sizes[region] = made.size
        self._devices.note_arena(made)
        return {**made.described(), "no_events": no_events, "reason": ""}, made.fds

    def close(self) -> None:
        """Release the connection of a dead stub."""
        self._connection = None

    def closed(self, region: int) -> None:
        """Record that the stub closed a segment."""
        self._sizes.pop(region, None)

    def _allocate(self, region: int, nbytes: int, *, first: bool) -> tuple[DeviceRegion, str]:
        """Allocate a segment, the first with events; return the reason if it has none."""
        devices = self._devices
        context = devices.context(self._device)
        segment = devices.sharing.allocate(context, region, nbytes, self._refusals)
        made, reason = None, ""
        try:
            if first:
                made, reason = StubArenaEvents.create(context, self._instance)
        except BridgeError:
            devices.free(segment)
            raise
        handed_on = partial(devices.events.need, self._device.uuid)
        return DeviceRegion(segment, devices.free, made, handed_on), reason
