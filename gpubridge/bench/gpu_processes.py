"""The processes that compute on a GPU, as ``nvidia-smi`` knows them."""

from __future__ import annotations

import subprocess

_PROGRAM = "nvidia-smi"


def processes_on(device: str) -> dict[int, int] | str:
    """Return the MiB of a device's memory by process, 0 where that is not told; or the reason why it is unknown."""
    query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", device]
    try:
        asked = subprocess.run(
            [_PROGRAM, *query], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{_PROGRAM} does not tell: {error}"
    found: dict[int, int] = {}
    for line in asked.stdout.splitlines():
        pid, _, used = (word.strip() for word in line.partition(","))
        if pid.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + (int(used) if used.isdigit() else 0)
    return found
