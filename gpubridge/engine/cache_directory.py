"""Directories for files that are kept across restarts, which other users cannot write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from gpubridge.errors import unavailable


def open_cache(name: str, configured: Path | None, purpose: str, option: str) -> Path:
    """Return the configured directory, else ``gpubridge/NAME`` in the user's cache directory.

    Falls back to a private directory in the system's temporary directory.

    - ``purpose``: words of the error before the directory.
    - ``option``: sets another directory.

    Raises BridgeError: UNAVAILABLE when no directory is writable by this user only.
    """
    try:
        if configured is not None:
            return _own_directory(configured.absolute())
        try:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            return _own_directory(home.absolute() / "gpubridge" / name)
        except (_Unusable, RuntimeError):
            # RuntimeError: this user has no home directory.
            folder = Path(tempfile.gettempdir()).absolute() / f"gpubridge-{name}-{os.getuid()}"
            return _own_directory(folder)
    except _Unusable as error:
        raise unavailable(
            f"{purpose} {error}; name a directory that only the server's user can write to with "
            f"{option}"
        ) from error


class _Unusable(Exception):
    """A directory cannot be used; the message names it and says why."""


def _own_directory(path: Path) -> Path:
    """Create a directory if needed, and check that other users cannot write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        status = path.stat()
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise _Unusable(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise _Unusable(f"{path}: it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise _Unusable(f"{path}: others may write to it (mode {mode:o})")
    if not usable:
        raise _Unusable(f"{path}: it cannot be written to")
    return path
