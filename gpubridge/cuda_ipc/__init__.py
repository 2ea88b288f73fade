"""Device memory between processes: devices, segments and slots of them, copies and their order.

Importing this loads nothing of CUDA; the driver is loaded by the first thing that is asked of it.
"""

from gpubridge.cuda_ipc.arena import DeviceArena, DeviceSlot
from gpubridge.cuda_ipc.context import DeviceContext, enable_peer_access, relax_captures
from gpubridge.cuda_ipc.copies import CopyCounts, CopyMark, CopyStream
from gpubridge.cuda_ipc.devices import (
    Ability,
    DeviceCheck,
    DeviceInfo,
    DeviceProbe,
    check_command,
    check_device,
    driver_release,
    end_check,
    find_device,
    is_exclusive,
    list_devices,
    no_check,
    probe_devices,
    probe_peers,
    read_check,
    visibility,
)
from gpubridge.cuda_ipc.driver import CudaError, DriverAbsent, bindings_absence
from gpubridge.cuda_ipc.driver_thread import DriverThread
from gpubridge.cuda_ipc.events import EventLease, EventRing, SharedEvents
from gpubridge.cuda_ipc.pinned import PinnedMemory, forget_pinning, pieces_of, plan_pinning
from gpubridge.cuda_ipc.segment import DeviceSegment, open_client_region
from gpubridge.cuda_ipc.staged import Part, StagedCopies

__all__ = [
    "Ability",
    "CopyCounts",
    "CopyMark",
    "CopyStream",
    "CudaError",
    "DeviceArena",
    "DeviceCheck",
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
    "check_command",
    "check_device",
    "driver_release",
    "enable_peer_access",
    "end_check",
    "find_device",
    "forget_pinning",
    "is_exclusive",
    "list_devices",
    "no_check",
    "open_client_region",
    "pieces_of",
    "plan_pinning",
    "probe_devices",
    "probe_peers",
    "read_check",
    "relax_captures",
    "visibility",
]
