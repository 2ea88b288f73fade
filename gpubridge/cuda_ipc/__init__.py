"""Device memory between processes: devices, segments and slots of them, copies and their order.

Importing this loads nothing of CUDA; the driver is loaded by the first thing that is asked of it.
"""

from gpubridge.cuda_ipc.arena import DeviceArena, DeviceSlot
from gpubridge.cuda_ipc.client_region import ClientDeviceRegion
from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyMark, CopyStream
from gpubridge.cuda_ipc.devices import (
    DeviceInfo,
    DeviceProbe,
    find_device,
    list_devices,
    probe_devices,
)
from gpubridge.cuda_ipc.driver import CudaError, DriverAbsent
from gpubridge.cuda_ipc.events import EventRing, ImportedEvents
from gpubridge.cuda_ipc.pinned import PinnedMemory
from gpubridge.cuda_ipc.probe import Ability, IpcProbe, probe_ipc, probe_peers
from gpubridge.cuda_ipc.segment import DeviceSegment

__all__ = [
    "Ability",
    "ClientDeviceRegion",
    "CopyMark",
    "CopyStream",
    "CudaError",
    "DeviceArena",
    "DeviceContext",
    "DeviceInfo",
    "DeviceProbe",
    "DeviceSegment",
    "DeviceSlot",
    "DriverAbsent",
    "EventRing",
    "ImportedEvents",
    "IpcProbe",
    "PinnedMemory",
    "find_device",
    "list_devices",
    "probe_devices",
    "probe_ipc",
    "probe_peers",
]
