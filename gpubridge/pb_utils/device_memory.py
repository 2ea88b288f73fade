"""CUDA memory for tensors, injected by the process that runs the model; may call the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.tensor.device_bytes import DeviceBytes, OrderingStream

if TYPE_CHECKING:
    from numpy.typing import NDArray


class DeviceMemory(Protocol):
    """The memory of the GPU that an instance is on. Any thread may call.

    Each method raises BridgeError where it fails: UNAVAILABLE where memory is short.
    """

    @property
    def ordinal(self) -> int:
        """The device's number in this process."""

    @property
    def stream(self) -> OrderingStream:
        """A stream on which a tensor of a library's is ordered that comes in."""

    @property
    def capacity(self) -> int:
        """Bytes of the instance's arena."""

    def allocate_device(self, nbytes: int) -> DeviceBytes:
        """Return writable, undefined bytes in the instance's arena."""

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Begin to copy host memory into the arena; `ready` tells when that is done.

        The memory must stay as it is until then; it is held.
        """

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        """Fill a writable buffer of exactly ``data.nbytes``, in order; it is full on return."""

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        """Return a copy in the instance's arena, in order; its `ready` tells when it is made."""


def device_memory() -> DeviceMemory:
    """Return this process's device memory, or raise TritonModelException where it has none."""
    around = host.current()
    if around is None or around.device is None:
        raise TritonModelException(
            "expected an instance on a GPU, got one without; give the model an instance_group of "
            "KIND_GPU"
        )
    return around.device


def host_copy(data: DeviceBytes) -> NDArray[np.uint8]:
    """Return bytes of the device in new host memory, or raise TritonModelException."""
    array = np.empty(data.nbytes, np.uint8)
    if data.nbytes:
        try:
            device_memory().copy_to_host(data, array.data)
        except BridgeError as error:
            raise TritonModelException(error.message) from None
    return array
