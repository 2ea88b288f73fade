"""Parts of every report: the machine, the commit, and how its files are written."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
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


def started_now() -> str:
    """Return the time of a run's start in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def file_stem(folder: str, title: str) -> Path:
    """Create a folder of reports; return the path for a title's files in it, without an ending."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")


def write_report(stem: Path, document: dict[str, Any], page: str) -> None:
    """Write a report as JSON and as a page of Markdown."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(page, encoding="utf-8")


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
