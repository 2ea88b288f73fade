"""Assumptions about a driver that can be tried, and what this one does: ``python -m tests.gpu.first_page``.

The assumptions are those of docs/explanation/device-ordering.md; where this driver does otherwise, the bridge does without,
and tests of that are skipped with the same reason.
"""

import dataclasses
import itertools

from gpubridge.cuda_ipc import probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from gpubridge.cuda_ipc.devices import is_exclusive, is_under_mps, probe_peers
from tests.gpu.results import add_result

_ASSUMED = {
    "memory": "a process opens another one's memory by a legacy handle",
    "memory_fds": "a process opens another one's memory by a VMM file descriptor",
    "events": "a stream waits for an event that another process has made, or recorded",
    "lost_events": "who waits for a killed process goes on when its event is recorded again, not before",
    "pinning": "shared host memory can be pinned",
}


def first_page() -> list[str]:
    """Return the lines; those of each device take some seconds."""
    found = probe_devices()
    if found.reason:
        return [f"no GPU can be used: {found.reason}"]
    lines = [
        f"what the driver of {found.count} GPUs does of what is assumed (docs/explanation/device-ordering.md):"
    ]
    for device in found.devices:
        lines.append(f"{device.name} ({device.uuid})")
        if is_exclusive(device):
            lines.append("  in exclusive mode: one process has it for itself, and most tests fail")
        if is_under_mps(device):
            lines.append("  under MPS: one fatal fault may end other processes, too")
        check = check_device(device.uuid)
        for field in dataclasses.fields(check):
            ability = getattr(check, field.name)
            add_result(check=field.name, device=device.name, reason=ability.reason)
            lines.append(_line(_ASSUMED.get(field.name, field.name), ability.reason))
    pairs = list(itertools.permutations(found.devices, 2))
    apart = [reason for pair in pairs if (reason := probe_peers(*pair).reason)]
    if pairs:
        add_result(check="peers", reason="; ".join(apart))
    if pairs and not apart:
        lines.append(_line("GPUs reach each other's memory", ""))
    return [*lines, *(_line("GPUs reach each other's memory", reason) for reason in apart)]


def _line(assumed: str, reason: str) -> str:
    return f"  {'NO ' if reason else 'yes'} {assumed}{f': {reason}' if reason else ''}"


if __name__ == "__main__":
    print(*first_page(), sep="\n")
