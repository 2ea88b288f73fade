"""Processes that use a device: those of the benchmark, and others."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_PROGRAM = "nvidia-smi"


def processes_on(device: str) -> dict[int, int] | str:
    """Return the MiB of a device's memory by process, 0 if not reported; or why they are unknown."""
    query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", device]
    try:
        asked = subprocess.run(
            [_PROGRAM, *query], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not tell: {error}"
    found: dict[int, int] = {}
    for line in asked.stdout.splitlines():
        pid, _, used = (word.strip() for word in line.partition(","))
        if pid.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + (int(used) if used.isdigit() else 0)
    return found


class BenchProcesses:
    """The processes on a device: those of the benchmark, and ``others``, which disturb it.

    ``absence`` is the reason why the former are unknown: in a container their pids may differ.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.absence = ""
        # Nothing of the benchmark is on the device yet.
        found = processes_on(device)
        self.others = set() if isinstance(found, str) else set(found) - {os.getpid()}

    def held_by(self, server: int) -> int | None:
        """Return the MiB of GPU memory of the benchmark's processes; None if unknown."""
        # Some end meanwhile: a server checks the device with short-lived processes.
        family = {os.getpid(), *process_tree(server)}
        found = processes_on(self._device)
        if isinstance(found, str):
            self.absence = found
            return None
        ours = found.keys() & (family | process_tree(server))
        if not ours:
            self.absence = "nvidia-smi knows none of these processes, as in a container"
            return None
        self.others |= found.keys() - ours
        return sum(found[pid] for pid in ours)


def process_tree(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in task.read_text().split():
                found |= process_tree(int(child))
    return found
