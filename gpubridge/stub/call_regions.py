"""The regions of memory that answers to a model's calls lie in: mapped as the server tells of them."""

from __future__ import annotations

from typing import Any

from gpubridge.errors import BridgeError
from gpubridge.stub.device.memory import StubDevice
from gpubridge.transport.calls import CallKind
from gpubridge.transport.channel import close_all
from gpubridge.transport.leases import BorrowedMemory

__all__ = ["REGION_KINDS", "take_region"]

REGION_KINDS = (CallKind.REGION, CallKind.DEVICE_REGION, CallKind.DROP_REGION)


def take_region(
    kind: int,
    fields: dict[str, Any],
    fds: list[int],
    borrowed: BorrowedMemory,
    device: StubDevice | None,
) -> None:
    """Map or unmap a region; an answer that lies in what cannot be mapped is an error.

    Raises
    ------
    BridgeError
        INVALID_ARG when a descriptor is not what was announced.
    """
    if kind == CallKind.DROP_REGION:
        borrowed.drop(fields["region"])
    elif kind == CallKind.REGION:
        borrowed.announce(fields["region"], fds.pop(), fields["size"])
    elif device is not None:
        try:
            borrowed.know(device.regions.announce(fields, fds))
        except BridgeError as error:
            device.note(error)
    else:
        close_all(fds)
