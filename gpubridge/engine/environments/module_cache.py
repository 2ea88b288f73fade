"""The cache of modules that were built for models' interpreters: one entry for each content of sources and ABI.

::

    CACHE/KEY/_native.ABI.so    the module
    CACHE/KEY/sha256            its digest
    CACHE/KEY.new-XXXXXX/       an entry that is being built; a killed process may leave it
    CACHE/KEY.lock              locked by the process that builds

What is loaded from here runs as the server's user. An entry is used only if that user, or root, owns it, no other
user may write to it, and the module has its digest: else it is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIGEST = "sha256"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LARGEST = 256 * 1024 * 1024


class ModuleCache:
    """The entries of one directory, which belongs to this user or root, and which others cannot write to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str, name: str) -> Path | None:
        """Return the module of an entry that can be trusted, or None."""
        entry = self._folder / key
        try:
            if not stat.S_ISDIR(_own(entry.lstat())):
                return None
            module, expected = _read(entry / name), _read(entry / _DIGEST)
        except OSError:
            return None
        return entry / name if hashlib.sha256(module).hexdigest().encode() == expected else None

    @contextmanager
    def locked(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of an entry; calls ``on_wait`` before it waits for another process."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._folder / f"{key}.lock", flags, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def new_entry(self, key: str, name: str) -> Iterator[Path]:
        """Yield the path to write a module to, which replaces the entry when the block ends well.

        The caller holds the lock.
        """
        for left in self._folder.glob(f"{key}.new-*"):
            _remove(left)
        fresh = Path(tempfile.mkdtemp(prefix=f"{key}.new-", dir=self._folder))
        try:
            module = fresh / name
            yield module
            module.chmod(0o500)
            (fresh / _DIGEST).write_bytes(hashlib.sha256(module.read_bytes()).hexdigest().encode())
            entry = self._folder / key
            _remove(entry)
            fresh.rename(entry)
        finally:
            _remove(fresh)


def _own(status: os.stat_result) -> int:
    """Return the mode of a file that only this user or root may write to; raises PermissionError."""
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & _OTHERS_WRITE:
        raise PermissionError
    return status.st_mode


def _read(path: Path) -> bytes:
    """Read a file that can be trusted; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(_own(status)) or status.st_size > _LARGEST:
            raise PermissionError
        return file.read(_LARGEST)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever was put in its place; nothing that a link leads to."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            shutil.rmtree(path)
            return
    path.unlink(missing_ok=True)
