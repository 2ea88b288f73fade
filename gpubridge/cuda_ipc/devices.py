"""The GPUs that this process may use; absence is a value with a reason.

Devices are known by their UUID: ``CUDA_VISIBLE_DEVICES`` hides and reorders, so that an ordinal means
another device in another process. Looking at devices creates no context.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import gpubridge
from gpubridge.cuda_ipc.driver import CudaError, call, load
from gpubridge.errors import BridgeError, not_found

# The compute mode in which any number of processes may use a device.
_SHARED = 0

# The directory that Python adds by itself is the user's, with modules of any name.
_PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from gpubridge.cuda_ipc.device_check import main; main(sys.argv[1:])"
)

_SHORTEST_REASON = "the check ended without a word"


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU, or a part of one that the driver shows as a device (MIG).

    ``ordinal`` is its number in this process, ``uuid`` (``GPU-xxxxxxxx-…`` or ``MIG-…``) the same
    in all; ``nbytes`` those of its memory.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class DeviceProbe:
    """The GPUs that can be used, by their ordinals, or the reason why there are none."""

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
    """Return the GPUs of this process; BridgeError without a driver, or one that does not work."""
    return tuple(_look_at(ordinal) for ordinal in range(call("cuDeviceGetCount")))


def find_device(device_uuid: str) -> DeviceInfo:
    """Return the device of a UUID, whatever its ordinal is here; BridgeError NOT_FOUND for none."""
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
    """Return the settings by which this process sees GPUs in an order of its own."""
    return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]


def driver_release() -> str:
    """Return the newest CUDA release that the driver knows, as ``12.9``; raises as `list_devices`."""
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
    # Older drivers do not say; where the daemon is, new processes are its clients.
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108  (its default)
    return Path(pipe, "control").exists()


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


@dataclass(frozen=True)
class Ability:
    """Something that works, unless there is a reason why not."""

    reason: str = ""

    @property
    def works(self) -> bool:
        """Return whether it works."""
        return not self.reason


@dataclass(frozen=True)
class DeviceCheck:
    """Abilities of a device that several processes use.

    One uses the other's ``memory`` by a legacy handle, or by a descriptor that it maps; streams
    wait for each other's ``events``; those that wait for a killed process do so until another one
    records its events again (``lost_events``); shared host memory is pinned. Unless ``tried``, the
    reasons say what was in the way, which may pass.
    """

    memory: Ability
    memory_fds: Ability
    events: Ability
    lost_events: Ability
    pinning: Ability
    tried: ClassVar[bool] = True


class _NoCheck(DeviceCheck):
    tried = False


def check_device(device_uuid: str, timeout_seconds: float = 60.0) -> DeviceCheck:
    """Let new processes share memory and events of a device, and pin memory for it.

    Takes a few seconds, and the memory of three contexts on the device meanwhile. After
    ``timeout_seconds`` they are ended, and the answer is no.
    """
    process = subprocess.Popen(
        check_command("export", device_uuid),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        end_check(process.pid)
        process.communicate()
        return no_check(f"the check did not end within {timeout_seconds:g} s")
    except BaseException:
        end_check(process.pid)
        process.communicate()
        raise
    return read_check(out, err, process.returncode)


def read_check(out: str, err: str, exit_code: int | None) -> DeviceCheck:
    """Return what the processes of a check have found, by what the first has printed."""
    try:
        found = json.loads(out)
        if "untried" in found:
            return no_check(found["untried"])
        return DeviceCheck(**{field.name: Ability(found[field.name]) for field in _FACTS})
    except (ValueError, KeyError):
        lines = err.strip().splitlines() or [_SHORTEST_REASON]
        return no_check(f"{lines[-1]} (exit code {exit_code})")


def probe_peers(device: DeviceInfo, peer: DeviceInfo) -> Ability:
    """Check whether a device reaches the memory of another; creates no context."""
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


def check_command(*arguments: str) -> list[str]:
    """Return the command of a process of a check, which reads nothing of the current folder."""
    home = str(Path(gpubridge.__file__).parent.parent)
    return [sys.executable, "-c", _PROGRAM, home, *arguments]


def end_check(pid: int) -> None:
    """Kill the processes of a check, by its first, which has not been waited for yet.

    All are in its group, and each may hang in the driver.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def no_check(reason: str) -> DeviceCheck:
    """Return the result of a check that came to nothing."""
    return _NoCheck(*(Ability(reason) for _ in _FACTS))


_FACTS = fields(DeviceCheck)
