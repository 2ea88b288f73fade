"""Device memory between processes: devices, segments and their slots, copies and their order.

Importing this loads nothing of CUDA; the first call loads the driver.
"""

from gpubridge.cuda_ipc.arena import DeviceArena, DeviceSlot
from gpubridge.cuda_ipc.context import DeviceContext, enable_peer_access, relax_captures
from gpubridge.cuda_ipc.copies import CopyCounts, CopyMark, CopyStream
from gpubridge.cuda_ipc.devices import (
    Ability,
    DeviceInfo,
    DeviceProbe,
    driver_release,
    find_device,
    is_exclusive,
    list_devices,
    probe_devices,
    probe_peers,
    visibility,
)
from gpubridge.cuda_ipc.driver import CudaError, DriverAbsent, DriverThread, bindings_absence
from gpubridge.cuda_ipc.events import (
    LONGEST_EVENT_SECONDS,
    EventLease,
    EventRing,
    SharedEvents,
    late_event,
)
from gpubridge.cuda_ipc.pinned import PinnedMemory
from gpubridge.cuda_ipc.segment import DeviceSegment, open_client_region
from gpubridge.cuda_ipc.staged import Part, StagedCopies

__all__ = [
    "LONGEST_EVENT_SECONDS",
    "Ability",
    "CopyCounts",
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
    "DriverThread",
    "EventLease",
    "EventRing",
    "Part",
    "PinnedMemory",
    "SharedEvents",
    "StagedCopies",
    "bindings_absence",
    "driver_release",
    "enable_peer_access",
    "find_device",
    "is_exclusive",
    "late_event",
    "list_devices",
    "open_client_region",
    "probe_devices",
    "probe_peers",
    "relax_captures",
    "visibility",
]
