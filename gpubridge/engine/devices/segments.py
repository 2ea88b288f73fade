"""The kinds of memory that tensors lie in, for those who ask which."""

from __future__ import annotations

from gpubridge.engine.devices.client_region import ClientDeviceSegment
from gpubridge.engine.devices.region import DeviceRegion
from gpubridge.host_shm import ClientSegment

__all__ = ["OF_CLIENTS", "ON_DEVICE"]

OF_CLIENTS = (ClientSegment, ClientDeviceSegment)
ON_DEVICE = (DeviceRegion, ClientDeviceSegment)
