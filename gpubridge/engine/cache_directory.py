"""Directories for files that are kept across restarts, which other users cannot write to."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from gpubridge.errors import unavailable


def open_cache(name: str, configured: Path | None, purpose: str, option: str) -> Path:
    """Return the configured directory, else ``gpubridge/NAME`` in the user's cache directory.

    Falls back to a private directory in the system's temporary directory.

    - ``purpose``: words of the error before the directory.
    - ``option``: sets another directory.

    Raises BridgeError: UNAVAILABLE when no directory is writable by this user only.
    """
    failure = None
    for folder in _candidates(name, configured):
        try:
            return _own_directory(folder)
        except _Unusable as error:
            failure = error
    raise unavailable(
        f"{purpose} {failure}; name a directory that only the server's user can write to with {option}"
    ) from failure


def trusted_caches(name: str, configured: Path | None) -> list[Path]:
    """Return those of these directories that exist and that other users cannot write to, be they read-only."""
    found = []
    for folder in _candidates(name, configured):
        with suppress(_Unusable, OSError):
            path = folder.resolve(strict=True)
            _check(path, path.stat())
            found.append(path)
    return found


def _candidates(name: str, configured: Path | None) -> list[Path]:
    """Return the directories to try, in order."""
    if configured is not None:
        return [configured.absolute()]
    found = [Path(tempfile.gettempdir()).absolute() / f"gpubridge-{name}-{os.getuid()}"]
    # RuntimeError: this user has no home directory.
    with suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        found.insert(0, home.absolute() / "gpubridge" / name)
    return found


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
    _check(path, status)
    if not usable:
        raise _Unusable(f"{path}: it cannot be written to")
    return path


def _check(path: Path, status: os.stat_result) -> None:
    """Raise _Unusable if other users can write to a directory."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise _Unusable(f"{path}: it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise _Unusable(f"{path}: others may write to it (mode {mode:o})")
