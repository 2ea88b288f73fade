"""Reading of untrusted files, without blocking and up to a size limit; names beside a missing one."""

from __future__ import annotations

import difflib
import errno
import os
import stat
from pathlib import Path

LONGEST_TEXT = 16 * 1024 * 1024
"""Maximum bytes of a configuration or a file of labels."""


def read_regular(path: Path, limit: int = LONGEST_TEXT) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises OSError, also for a FIFO or a device, which might never end, and for a longer file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        parts = []
        left = limit + 1
        # A file may be longer than its size says.
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return b"".join(parts)


def similar_path(path: Path) -> str:
    """Return a question for the most similar path beside a missing one; empty where there is none."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    likely = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / likely[0]}?" if likely else ""
