"""Memory that this process and its children may use: the machine's, or what their container has."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_memory(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the bytes of the machine's memory, or the lowest limit of this process's control groups.

    - ``groups``: the list of the process's groups, of version 1 or 2.
    - ``mount``: where their files are. In a container they are those of its own group alone.
    """
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            try:
                limit = int((root / folder.relative_to("/") / name).read_text())
            except (OSError, ValueError):
                # Not seen in here; the word max.
                continue
            least = min(least, limit)
    return least
