"""The cache of remote models: a snapshot of a model's files for each of their states.

::

    CACHE/REPOSITORY/MODEL/lock                   locked while a snapshot is made or removed
    CACHE/REPOSITORY/MODEL/STATE-UNIQUE/lock      locked, shared, by servers that use it
    CACHE/REPOSITORY/MODEL/STATE-UNIQUE/MODEL/    the files
    CACHE/REPOSITORY/MODEL/.new-UNIQUE/           being made, or left by a killed server

A file's modification time is the checksum of the remote one, so that the files' states show whether a
snapshot is whole and which of its files another one may link to.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpubridge.engine.repository.model_files import FileStates, HeldDirectory, file_states
from gpubridge.errors import unavailable

_LOCK = "lock"
_LOCK_EVERY = 0.2
_NEW = ".new-"


class CachedModel:
    """The snapshots of one model, for use in one thread that holds :meth:`locked`."""

    def __init__(self, cache: Path, name: str) -> None:
        self._name = name
        self._folder = cache / name

    @contextmanager
    def locked(self, wait: Callable[[float], None]) -> Iterator[None]:
        """Lock the model against other servers and threads; ``wait`` sleeps between attempts."""
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        lock = _open_lock(self._folder)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    wait(_LOCK_EVERY)
            yield
        finally:
            os.close(lock)

    def find(self, states: FileStates) -> HeldDirectory | None:
        """Return the snapshot with the files of a state, if there is one."""
        for root in self._folder.glob(f"{_digest(states)}-*"):
            if not missing_files(root / self._name, states):
                return self._use(root)
        return None

    @contextmanager
    def begin(self) -> Iterator[Path]:
        """Make an empty directory for a model; whatever remains there at the end is removed."""
        root = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._folder))
        try:
            (root / self._name).mkdir(mode=0o700)
            yield root / self._name
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def link(self, model: Path, states: FileStates) -> FileStates:
        """Link files of other snapshots that have not changed; return the states of the others."""
        missing = states
        for root in self._folder.iterdir():
            other = root / self._name
            for path, *_ in set(missing).difference(missing_files(other, missing)):
                make_parents(model, path)
                try:
                    os.link(other / path, model / path)
                except OSError:
                    # The file system has no links.
                    break
            missing = missing_files(model, states)
        return missing

    def complete(self, model: Path, states: FileStates) -> HeldDirectory:
        """Publish a whole directory that `begin` made, and remove unused snapshots."""
        unique = model.parent.name.removeprefix(_NEW)
        root = model.parent.rename(self._folder / f"{_digest(states)}-{unique}")
        snapshot = self._use(root)
        self.remove_unused()
        return snapshot

    def _use(self, root: Path) -> HeldDirectory:
        """Return a snapshot that no server removes until it is released."""
        lock = _open_lock(root)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return HeldDirectory(root / self._name, partial(os.close, lock))

    def remove_unused(self) -> None:
        """Remove snapshots that no server uses, and what killed servers left."""
        for root in self._folder.iterdir():
            if root.is_dir() and _is_unused(root):
                shutil.rmtree(root, ignore_errors=True)


def make_parents(model: Path, path: str) -> None:
    """Make the directories of a file."""
    for folder in [*Path(path).parents][-2::-1]:
        (model / folder).mkdir(mode=0o700, exist_ok=True)


def finish_file(path: Path, changed_ns: int) -> None:
    """Flush a file, and give it its final permissions and time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.utime(descriptor, ns=(changed_ns, changed_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def missing_files(model: Path, states: FileStates) -> FileStates:
    """Return the states that the files of a directory do not have."""
    present = set(file_states(model))
    return tuple(state for state in states if state not in present)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OSError: ENOSPC when a disk has fewer free bytes."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes needed, {free} free")


def repository_folder(url: str) -> str:
    """Return the name of a repository's directory in the cache."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _digest(states: FileStates) -> str:
    return hashlib.sha256(repr(sorted(states)).encode()).hexdigest()[:32]


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(folder / _LOCK, flags, 0o600)
    except OSError as error:
        raise unavailable(f"{folder / _LOCK} cannot be opened: {error.strerror}") from error


def _is_unused(root: Path) -> bool:
    lock = _open_lock(root)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
