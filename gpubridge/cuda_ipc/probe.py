"""What processes can do with a device here: tried, and answered as values with reasons.

A process cannot open its own handles, and a failure may cost a process its context. So two processes
of their own try it (`device_check`); the one that asks gets no context by asking.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gpubridge
from gpubridge.cuda_ipc.devices import DeviceInfo
from gpubridge.cuda_ipc.driver import call
from gpubridge.errors import BridgeError

__all__ = ["Ability", "DeviceCheck", "check_command", "check_device", "probe_peers"]

# The directory that Python adds by itself is the user's, with modules of any name.
_PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from gpubridge.cuda_ipc.device_check import main; main(sys.argv[1:])"
)
_SHORTEST_REASON = "the check ended without a word"


@dataclass(frozen=True)
class Ability:
    """Whether something works.

    Attributes
    ----------
    works : bool
        Whether it does.
    reason : str
        Why it does not; empty when it does.
    """

    works: bool
    reason: str


@dataclass(frozen=True)
class DeviceCheck:
    """What two processes can do with a device.

    Attributes
    ----------
    memory : Ability
        Whether one reads and writes the other's allocation, opened by its legacy handle.
    memory_fds : Ability
        Whether one reads and writes the other's memory, mapped by its file descriptor.
    events : Ability
        Whether one's streams wait for the other's.
    pinning : Ability
        Whether shared host memory can be pinned.
    """

    memory: Ability
    memory_fds: Ability
    events: Ability
    pinning: Ability


def check_device(device_uuid: str, timeout_seconds: float = 60.0) -> DeviceCheck:
    """Let two new processes share memory and events of a device, and pin memory for it.

    Takes a second or more, and a context's memory on the device for each process meanwhile.

    Parameters
    ----------
    device_uuid : str
        `DeviceInfo.uuid`.
    timeout_seconds : float
        After which they are ended, and the answer is no.
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
        _end_group(process)
        return _nothing(f"the check did not end within {timeout_seconds:g} s")
    except BaseException:
        _end_group(process)
        raise
    try:
        found = json.loads(out)
        names = ("memory", "memory_fds", "events", "pinning")
        return DeviceCheck(*(_ability(found[name]) for name in names))
    except (ValueError, KeyError):
        lines = err.strip().splitlines() or [_SHORTEST_REASON]
        return _nothing(f"{lines[-1]} (exit code {process.returncode})")


def probe_peers(device: DeviceInfo, peer: DeviceInfo) -> Ability:
    """Whether a device reaches another one's memory; creates no context."""
    try:
        ordinals = call("cuDeviceGet", device.ordinal), call("cuDeviceGet", peer.ordinal)
        if call("cuDeviceCanAccessPeer", *ordinals):
            return Ability(works=True, reason="")
    except BridgeError as error:
        return Ability(works=False, reason=error.message)
    return Ability(
        works=False,
        reason=f"GPU {device.ordinal} cannot reach the memory of GPU {peer.ordinal}: tensors cross "
        "between them in host memory",
    )


def check_command(*arguments: str) -> list[str]:
    """Return the command of one of the two processes, which reads nothing of the current folder."""
    home = str(Path(gpubridge.__file__).parent.parent)
    return [sys.executable, "-c", _PROGRAM, home, *arguments]


def _end_group(process: subprocess.Popen[str]) -> None:
    # Both processes are in it, and either may hang in the driver. The first has not been waited for
    # yet, so that its id is nobody else's.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _ability(reason: str) -> Ability:
    return Ability(works=not reason, reason=reason)


def _nothing(reason: str) -> DeviceCheck:
    return DeviceCheck(*(_ability(reason) for _ in range(4)))
