"""The GPUs that this process may use; absence is a value with a reason.

Devices are known by their UUID: ``CUDA_VISIBLE_DEVICES`` hides and reorders, so that an ordinal means
another device in another process. Looking at devices creates no context.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from gpubridge.cuda_ipc.driver import CudaError, call, load
from gpubridge.errors import BridgeError, not_found

# The compute mode in which any number of processes may use a device.
_SHARED = 0

_EXTRAS = {12: "gpubridge[image-gpu-cu12]", 13: "gpubridge[image-gpu]"}
_DRIVERS = {12: "R530", 13: "R580"}
"""The first branch of the NVIDIA driver that supports those packages."""


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU, or a part of one that the driver shows as a device (MIG).

    ``ordinal`` is its number in this process, ``uuid`` (``GPU-xxxxxxxx-…`` or ``MIG-…``) is the same
    in all; ``nbytes`` is the size of its memory.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class DeviceProbe:
    """The usable GPUs in the order of their ordinals, or the reason why there are none."""

    count: int
    reason: str
    devices: tuple[DeviceInfo, ...] = ()


@dataclass(frozen=True)
class Ability:
    """An ability of a device; ``reason`` says why it does not work, if so."""

    reason: str = ""

    @property
    def works(self) -> bool:
        """Return whether it works."""
        return not self.reason


def probe_devices() -> DeviceProbe:
    """Look for the GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` allows."""
    try:
        devices = list_devices()
    except BridgeError as error:
        return DeviceProbe(0, error.message)
    return DeviceProbe(len(devices), "" if devices else "the driver reports no device", devices)


def list_devices() -> tuple[DeviceInfo, ...]:
    """Return the GPUs of this process; BridgeError without a working driver."""
    return tuple(_device_info(ordinal) for ordinal in range(call("cuDeviceGetCount")))


def find_device(device_uuid: str) -> DeviceInfo:
    """Return the device of a UUID; BridgeError NOT_FOUND for none."""
    devices = list_devices()
    for device in devices:
        if device.uuid == device_uuid:
            return device
    seen = ", ".join(device.uuid for device in devices) or "none"
    raise not_found(
        f"GPU {device_uuid} is not seen by this process, which sees {seen}; check "
        "CUDA_VISIBLE_DEVICES"
    )


def visibility() -> list[str | None]:
    """Return the environment settings that determine the order of GPUs in this process."""
    return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]


def driver_release() -> str:
    """Return the newest CUDA release that the driver supports, as ``12.9``; raises as `list_devices`."""
    version = int(call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def is_exclusive(device: DeviceInfo) -> bool:
    """Return whether a device is restricted to one process or none; raises as `list_devices`."""
    attribute = load().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    mode = call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", device.ordinal))
    return bool(mode != _SHARED)


def is_under_mps(device: DeviceInfo) -> bool:
    """Return whether processes share a device by MPS; raises as `list_devices`."""
    attribute = getattr(load().CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    ordinal = call("cuDeviceGet", device.ordinal)
    with contextlib.suppress(CudaError):
        if attribute is not None:
            return bool(call("cuDeviceGetAttribute", attribute, ordinal))
    # Older drivers have no attribute; new processes are clients of a running daemon.
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108  (its default)
    return Path(pipe, "control").exists()


def probe_peers(device: DeviceInfo, peer: DeviceInfo) -> Ability:
    """Check whether a device reaches the memory of another, without a context."""
    try:
        ordinals = call("cuDeviceGet", device.ordinal), call("cuDeviceGet", peer.ordinal)
        if call("cuDeviceCanAccessPeer", *ordinals):
            return Ability()
    except BridgeError as error:
        return Ability(error.message)
    return Ability(
        f"GPU {device.ordinal} cannot reach the memory of GPU {peer.ordinal}: tensors cross "
        "between them in host memory"
    )


def installed_releases(package: str) -> dict[str, int]:
    """Return the CUDA releases of the installed distributions of an NVIDIA package.

    A release is the end of the distribution's name (``-cu12``), or the first number of its version.
    """
    from importlib import metadata  # noqa: PLC0415  (rarely needed, and slow to import)

    found = {}
    for distribution in metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        match = re.fullmatch(re.escape(package) + r"(-cu(\d+))?", name)
        if match:
            release = match[2] or distribution.version.partition(".")[0]
            found[f"{name} {distribution.version}"] = int(release)
    return found


def image_extra() -> str:
    """Return the extra of gpubridge for images on a GPU that suits the driver, or both without one."""
    try:
        known = int(driver_release().partition(".")[0])
    except BridgeError:
        return f"'{_EXTRAS[13]}' (driver {_DRIVERS[13]} or newer) or '{_EXTRAS[12]}'"
    return f"'{_EXTRAS[13 if known >= 13 else 12]}'"


def too_new(release: int) -> str:
    """Return advice about a package for a CUDA release; empty if the driver supports it."""
    try:
        known = driver_release()
    except BridgeError:
        return ""
    if release <= int(known.partition(".")[0]):
        return ""
    newest = _DRIVERS.get(release, "the newest")
    return (
        f"it is for CUDA {release}, and the driver knows {known}: uninstall it and pip install "
        f"{image_extra()}, or update the NVIDIA driver to {newest}"
    )


def _device_info(ordinal: int) -> DeviceInfo:
    device = call("cuDeviceGet", ordinal)
    name = call("cuDeviceGetName", 256, device).split(b"\0", 1)[0].decode(errors="replace")
    raw = bytes(call(_uuid_function(), device).bytes)
    return DeviceInfo(ordinal, _uuid_text(name, raw), name, int(call("cuDeviceTotalMem", device)))


def _uuid_function() -> str:
    # The first version returns the whole GPU's UUID for a MIG device; newer bindings have the second only.
    newer = "cuDeviceGetUuid_v2"
    return newer if hasattr(load(), newer) else "cuDeviceGetUuid"


def _uuid_text(name: str, raw: bytes) -> str:
    # The driver returns a MIG device's own UUID; only the name shows that it is one.
    prefix = "MIG" if " MIG " in f"{name} " else "GPU"
    return f"{prefix}-{uuid.UUID(bytes=raw)}"
