"""The events of a stub's arena: made by the server, so that they outlive the stub that records them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubridge.cuda_ipc import CudaError, DeviceContext, SharedEvents
from gpubridge.errors import BridgeError
from gpubridge.transport.control import EVENTS

if TYPE_CHECKING:
    from gpubridge.engine.devices.memory import DeviceMemory

_logger = logging.getLogger(__name__)


class ArenaEvents:
    """The events by which a stub says when what it has handed on is complete.

    ``shared``: owned from now on.
    """

    def __init__(self, shared: SharedEvents, uuid: str, instance: str) -> None:
        self._shared = shared
        self._uuid = uuid
        self._instance = instance
        self.handles = b"".join(shared.handles)
        self.count = len(shared.handles)

    @classmethod
    def create(cls, context: DeviceContext, instance: str) -> tuple[ArenaEvents | None, str]:
        """Make events; None, and why, where they do not cross processes. On the driver's thread."""
        try:
            shared = SharedEvents.create(context, EVENTS)
        except CudaError as error:
            if error.sticky:
                raise
            return None, error.message
        return cls(shared, context.device.uuid, instance), ""

    def done(self, number: int) -> bool:
        """Return whether an event has completed; on the driver's thread."""
        return self._shared.done(number)

    @property
    def loss(self) -> str:
        """Return the error text for an event that never completes."""
        return (
            f"Stub process '{self._instance}' is not healthy. It died before what it had handed on "
            "was complete on the GPU; send the request again"
        )

    async def pass_for_dead(self, devices: DeviceMemory, numbers: Sequence[int]) -> None:
        """Let events come to pass whose stub is dead: who waits for them goes on, with undefined data."""
        try:
            await devices.run(lambda: self._record(numbers, devices.stream(self._uuid).handle))
        except BridgeError as error:
            _logger.warning("who waits for a dead stub cannot be released: %s", error.message)

    def _record(self, numbers: Sequence[int], stream: int) -> None:
        for number in numbers:
            self._shared.record(number, stream)

    def close(self) -> None:
        """Give the events back; on the driver's thread."""
        self._shared.close()
