"""The GPUs that this process may use; absence is a value with a reason.

Devices are known by their UUID: ``CUDA_VISIBLE_DEVICES`` hides and reorders, so that an ordinal means
another device in another process. Looking at devices creates no context.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from gpubridge.cuda_ipc.driver import call, load
from gpubridge.errors import BridgeError, ErrorCode

__all__ = [
    "DeviceInfo",
    "DeviceProbe",
    "driver_release",
    "find_device",
    "is_exclusive",
    "list_devices",
    "probe_devices",
]

# The compute mode in which any number of processes may use a device.
_SHARED = 0


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU, or a part of one that the driver shows as a device (MIG).

    Attributes
    ----------
    ordinal : int
        Its number in this process.
    uuid : str
        ``GPU-xxxxxxxx-xxxx-…``, or ``MIG-…``: the same in every process.
    name : str
        As the driver calls it.
    nbytes : int
        Bytes of its memory.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class DeviceProbe:
    """What was found.

    Attributes
    ----------
    count : int
        GPUs that can be used.
    reason : str
        Why there are none; empty when there are.
    devices : tuple of DeviceInfo
        By their ordinals.
    """

    count: int
    reason: str
    devices: tuple[DeviceInfo, ...] = ()


def probe_devices() -> DeviceProbe:
    """Look for the GPUs of this process (``CUDA_VISIBLE_DEVICES`` holds)."""
    try:
        devices = list_devices()
    except BridgeError as error:
        return DeviceProbe(0, error.message)
    return DeviceProbe(len(devices), "" if devices else "the driver reports no device", devices)


def list_devices() -> tuple[DeviceInfo, ...]:
    """Return the GPUs of this process.

    Raises
    ------
    BridgeError
        There is no driver, or it does not work.
    """
    return tuple(_look_at(ordinal) for ordinal in range(call("cuDeviceGetCount")))


def find_device(device_uuid: str) -> DeviceInfo:
    """Return the device of a UUID, whatever its ordinal is here.

    Raises
    ------
    BridgeError
        NOT_FOUND when this process does not see it; as `list_devices` otherwise.
    """
    devices = list_devices()
    for device in devices:
        if device.uuid == device_uuid:
            return device
    seen = ", ".join(device.uuid for device in devices) or "none"
    raise BridgeError(
        f"GPU {device_uuid} is not seen by this process, which sees {seen}; check "
        "CUDA_VISIBLE_DEVICES",
        ErrorCode.NOT_FOUND,
    )


def driver_release() -> str:
    """Return the newest CUDA release that the driver knows, as ``12.9``; raises as `list_devices`."""
    version = int(call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def is_exclusive(device: DeviceInfo) -> bool:
    """Whether the device is set to be used by one process, or none; raises as `list_devices`."""
    attribute = load().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    mode = call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", device.ordinal))
    return bool(mode != _SHARED)


def _look_at(ordinal: int) -> DeviceInfo:
    device = call("cuDeviceGet", ordinal)
    name = call("cuDeviceGetName", 256, device).split(b"\0", 1)[0].decode(errors="replace")
    raw = bytes(call(_uuid_function(), device).bytes)
    return DeviceInfo(ordinal, _uuid_text(name, raw), name, int(call("cuDeviceTotalMem", device)))


def _uuid_function() -> str:
    # The first form gives a part of a GPU the UUID of the whole; newer bindings have the second only.
    newer = "cuDeviceGetUuid_v2"
    return newer if hasattr(load(), newer) else "cuDeviceGetUuid"


def _uuid_text(name: str, raw: bytes) -> str:
    # The driver gives a MIG device's own UUID, and says only in the name that it is one.
    prefix = "MIG" if " MIG " in f"{name} " else "GPU"
    return f"{prefix}-{uuid.UUID(bytes=raw)}"
