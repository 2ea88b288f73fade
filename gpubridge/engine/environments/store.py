"""The directory of unpacked environments: one for each content, kept from one start to the next.

::

    CACHE/DIGEST/environment/   the tree
    CACHE/DIGEST/complete       says that all of it is there, and where it was unpacked
    CACHE/DIGEST.lock           whoever unpacks holds a lock on it
    CACHE/known/STATE           the digest of an archive by its path, inode, size and times

An entry without its mark is what somebody left who was killed: it is made anew. Environments are not
moved once unpacked, since what is in them may have their path written into it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gpubridge.errors import BridgeError, unavailable

_MARK = "complete"
_LOCK_SUFFIX = ".lock"
_KNOWN = "known"
_SETTLED_NS = 2_000_000_000
"""A file that was changed this long ago gets another time with the next change, on any file system."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Contents of an entry's mark.

    - ``location``: where it was unpacked.
    - ``source``: the archive.
    - ``nbytes``, ``members``: how much came out of it.
    """

    location: str
    source: str
    nbytes: int
    members: int


class Entry:
    """The place of one content in the store."""

    def __init__(self, cache: Path, digest: str) -> None:
        self.environment = cache / digest / "environment"
        self._root = cache / digest
        self._lock = cache / f"{digest}{_LOCK_SUFFIX}"

    def facts(self) -> Facts | None:
        """Return what is there, or None unless all of it is."""
        try:
            facts = Facts(**json.loads((self._root / _MARK).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        whole = facts.location == str(self.environment) and self.environment.is_dir()
        return facts if whole else None

    def lock(self, *, wait: bool) -> int | None:
        """Return a descriptor that holds the entry's lock until it is closed in every process.

        None when somebody else holds it and `wait` is false.
        """
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def begin(self) -> None:
        """Make the empty tree, in the place of what there was; the lock is held."""
        self.remove()
        self.environment.mkdir(mode=0o700, parents=True)

    def complete(self, facts: Facts) -> None:
        """Mark the entry as whole; the lock is held, and what is in it has reached the disk."""
        _write(self._root / _MARK, json.dumps(asdict(facts)))

    def remove(self) -> None:
        """Remove what there is; the lock is held."""
        (self._root / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self._root, ignore_errors=True)


class EnvironmentStore:
    """The entries of one cache directory, which exists and is this user's own."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def entry(self, digest: str) -> Entry:
        """Return the place of a content, whether it is there or not."""
        return Entry(self.cache, digest)

    def find(self, archive: Path) -> Entry | None:
        """Return the whole entry of an archive that is known to be unchanged."""
        try:
            digest = self._known(archive, archive.stat()).read_text()
        except OSError:
            return None
        entry = self.entry(digest)
        return entry if entry.facts() is not None else None

    def remember(self, archive: Path, status: os.stat_result, digest: str) -> None:
        """Spare the next start the reading of an archive, whose state was `status` all the time."""
        if time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) < _SETTLED_NS:
            return
        known = self.cache / _KNOWN
        known.mkdir(mode=0o700, exist_ok=True)
        for path in known.iterdir():
            if path.suffix:
                # Somebody is about to write it.
                continue
            try:
                forgotten = not self.entry(path.read_text()).environment.exists()
            except FileNotFoundError:
                continue
            if forgotten:
                path.unlink(missing_ok=True)
        _write(self._known(archive, status), digest)

    def remove_orphans(self) -> None:
        """Remove what was left half unpacked and nobody works on."""
        for lock in self.cache.glob(f"*{_LOCK_SUFFIX}"):
            entry = self.entry(lock.name.removesuffix(_LOCK_SUFFIX))
            if not entry.environment.exists() or entry.facts() is not None:
                continue
            fd = entry.lock(wait=False)
            if fd is None:
                continue
            try:
                if entry.facts() is None:
                    entry.remove()
            finally:
                os.close(fd)

    def _known(self, archive: Path, status: os.stat_result) -> Path:
        state = (
            os.path.realpath(archive),
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        return self.cache / _KNOWN / hashlib.sha256(json.dumps(state).encode()).hexdigest()


def open_store(configured: Path | None) -> EnvironmentStore:
    """Return the store in the configured directory, else in the user's cache directory.

    Where the user has no such directory, or it cannot be written to, it is a private one in the
    system's directory for temporary files.

    Raises BridgeError: UNAVAILABLE when there is no place that only this user can write to.
    """
    if configured is not None:
        return EnvironmentStore(_own_directory(configured.absolute()))
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return EnvironmentStore(_own_directory(home.absolute() / "gpubridge" / "environments"))
    except (BridgeError, RuntimeError):
        # RuntimeError: this user has no home.
        folder = Path(tempfile.gettempdir()).absolute() / f"gpubridge-environments-{os.getuid()}"
        return EnvironmentStore(_own_directory(folder))


def _own_directory(path: Path) -> Path:
    """Make a directory, unless there is one, and check that nobody else can write to it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        status = path.stat()
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise _no_place(path, error.strerror or str(error)) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise _no_place(path, f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _no_place(path, f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})")
    if not usable:
        raise _no_place(path, "it cannot be written to")
    return path


def _no_place(path: Path, why: str) -> BridgeError:
    return unavailable(
        f"environments cannot be unpacked to {path}: {why}; name a directory that only the server's user "
        "can write to with --backend-config=python,environment-cache=DIR"
    )


def _write(path: Path, text: str) -> None:
    """Write a small file that is whole as soon as it has its name."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
