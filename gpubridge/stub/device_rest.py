"""What a stub does for its GPU while nothing comes: gives back what streams have passed by."""

from __future__ import annotations

from gpubridge.errors import BridgeError
from gpubridge.stub.device_memory import StubDevice
from gpubridge.transport.channel import Channel

__all__ = ["settle_until_message"]

_FIRST_LOOK = 0.0005
_LONGEST_LOOK = 0.02


def settle_until_message(device: StubDevice | None, channel: Channel) -> None:
    """Give back memory as soon as its streams have passed, until a message is there or all is back.

    Nor is anybody told, else, that work has failed which others wait for. A client cannot unregister memory that is lent, nor the server give its slot to others; the next
    request, with which it would go back else, may never come.
    """
    pause = _FIRST_LOOK
    while device is not None and device.lost is None and device.busy and not channel.wait(pause):
        try:
            device.settle()
        except BridgeError as error:
            device.note(error)
            return
        pause = min(2 * pause, _LONGEST_LOOK)
