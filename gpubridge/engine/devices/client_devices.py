"""Opens clients' CUDA memory: each handle once, however many names it is registered under."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from gpubridge.cuda_ipc import CudaError, DeviceInfo, open_client_region
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.devices.region import ClientDeviceSegment
from gpubridge.errors import BridgeError, ErrorCode


class ClientDevices:
    """The clients' device memory that the server has open.

    - ``devices``: the GPUs.
    - ``new_region``: gives a region id.
    """

    def __init__(self, devices: DeviceMemory, new_region: Callable[[], int]) -> None:
        self._devices = devices
        self._new_region = new_region
        self._open: weakref.WeakValueDictionary[tuple[str, bytes, int], ClientDeviceSegment] = (
            weakref.WeakValueDictionary()
        )

    async def open(
        self, name: str, handle: bytes, device_id: int, nbytes: int
    ) -> ClientDeviceSegment:
        """Open what a client registers; checked to be on that device, and to have so many bytes.

        Raises BridgeError: INVALID_ARG when that is not so, UNAVAILABLE when there is no GPU.
        """
        try:
            # It may be the first time that somebody asks for a GPU.
            device = await self._devices.run(partial(self._devices.device, device_id))
            return await self._devices.run(partial(self._opened, device, handle, nbytes))
        except CudaError as error:
            raise _refused(name, error.message, error.code) from error
        except BridgeError as error:
            raise _refused(name, error.message, ErrorCode.INVALID_ARG) from error

    def _opened(self, device: DeviceInfo, handle: bytes, nbytes: int) -> ClientDeviceSegment:
        """Open it, on the driver's thread."""
        key = device.uuid, handle, nbytes
        segment = self._open.get(key)
        if segment is None:
            region = open_client_region(self._devices.context(device), handle, nbytes)
            segment = ClientDeviceSegment(region, self._new_region(), handle, self._devices.free)
            self._open[key] = segment
        return segment


def _refused(name: str, reason: str, code: ErrorCode) -> BridgeError:
    return BridgeError(f"failed to register CUDA shared memory region '{name}': {reason}", code)
