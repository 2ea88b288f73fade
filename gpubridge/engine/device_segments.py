"""The kinds of memory that tensors lie in, for those who ask which."""

from __future__ import annotations

from gpubridge.engine.client_device_region import ClientDeviceSegment
from gpubridge.engine.device_memory import DeviceRegion
from gpubridge.host_shm import ClientSegment

__all__ = ["OF_CLIENTS", "ON_DEVICE"]

OF_CLIENTS = (ClientSegment, ClientDeviceSegment)
ON_DEVICE = (DeviceRegion, ClientDeviceSegment)
