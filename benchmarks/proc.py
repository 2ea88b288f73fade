"""Facts of the kernel about a tree of processes: memory, descriptors, threads, CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpubridge.bench.processes import process_tree

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals over a process and its descendants at one moment."""

    rss_mib: float
    pss_mib: float
    descriptors: int
    threads: int
    processes: int


def usage(root: int) -> Usage:
    """Return the usage of ``root`` and its descendants; a process that just ended counts as nothing.

    PSS shares out pages between the processes that map them, so its sum counts each page once:
    it is the figure to compare. The RSS sum counts shared pages once per process.
    """
    rss = pss = descriptors = threads = processes = 0
    for pid in process_tree(root):
        try:
            rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
            descriptors += len(list((_PROC / str(pid) / "fd").iterdir()))
            threads += len(list((_PROC / str(pid) / "task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        sizes = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
        rss += int(sizes["Rss"].split()[0])
        pss += int(sizes["Pss"].split()[0])
        processes += 1
    return Usage(rss / 1024, pss / 1024, descriptors, threads, processes)


def cpu_seconds(root: int) -> float:
    """Return the user and system time that ``root`` and its living descendants have used."""
    ticks = 0
    for pid in process_tree(root):
        if fields := _stat_fields(pid):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def started(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 for one that has ended."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The command in parentheses may itself hold blanks and parentheses.
    return text.rpartition(")")[2].split()
