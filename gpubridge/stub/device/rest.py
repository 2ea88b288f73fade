"""What a stub does for its GPU while nothing comes: gives back what streams have passed by."""

from __future__ import annotations

from typing import Protocol

from gpubridge.cuda_ipc import CudaError
from gpubridge.errors import BridgeError
from gpubridge.stub.device.memory import StubDevice


class Incoming(Protocol):
    """Where messages come from."""

    def wait(self, seconds: float) -> bool:
        """Wait until one is there, for so long at most; tell whether that is so."""


_FIRST_LOOK = 0.0005
_LONGEST_LOOK = 0.02


def settle_until_message(device: StubDevice, channel: Incoming) -> CudaError | None:
    """Give back memory as soon as its streams have passed, until a message is there or all is back.

    A client cannot unregister memory that is lent, nor the server give its slot to others; the next
    request, with which it would go back else, may never come. And work may fail that others wait for,
    of which nobody else is told.

    Returns: why nothing of the device works any more, if that is so.
    """
    pause = _FIRST_LOOK
    while device.lost is None and device.busy and not channel.wait(pause):
        try:
            device.settle()
        except BridgeError as error:
            device.note(error)
            break
        pause = min(2 * pause, _LONGEST_LOOK)
    return device.lost
