"""The machine and the versions that stand beside every figure."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, Any]:
    """Return CPU, cores this process may use, memory, kernel, Python and the load before the run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the commit of this working tree, marked when tracked files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_PROJECT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
