"""The store of unpacked environments: one entry for each content, kept across restarts.

::

    CACHE/DIGEST/environment/   the tree
    CACHE/DIGEST/complete       mark of a complete tree, with the path of its unpacking
    CACHE/DIGEST.lock           locked by the process that unpacks
    CACHE/known/STATE           the digest of an archive by its path, inode, size and times

An entry without its mark was left by a killed process, and one that lacks files was emptied by someone who
frees disk space: both are made again. Environments are not moved
after unpacking, since their files may contain their path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gpubridge.engine.cache_directory import open_cache

_MARK = "complete"
_LOCK_SUFFIX = ".lock"
_KNOWN = "known"
_BYTECODE = "__pycache__"
_TIME_GRANULARITY_NS = 2_000_000_000
"""Longest granularity of file times: a later change of an older file changes its time."""


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """Contents of an entry's mark.

    - ``location``: the path of the unpacked tree.
    - ``source``: the archive.
    - ``nbytes``, ``members``: size of the contents.
    - ``entries``: the number of files, links and directories in the tree, without bytecode caches.
    """

    location: str
    source: str
    nbytes: int
    members: int
    entries: int = 0


class Entry:
    """The entry of one content in the store."""

    def __init__(self, cache: Path, digest: str) -> None:
        self.environment = cache / digest / "environment"
        self._root = cache / digest
        self._lock = cache / f"{digest}{_LOCK_SUFFIX}"

    def facts(self) -> EntryFacts | None:
        """Return the facts of a complete entry, of which nothing was removed since; else None."""
        try:
            facts = EntryFacts(**json.loads((self._root / _MARK).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        if facts.location != str(self.environment):
            return None
        return facts if _count_entries(self.environment) >= facts.entries > 0 else None

    def lock(self, *, wait: bool) -> int | None:
        """Lock the entry; return a descriptor that holds the lock until every copy of it is closed.

        Returns None when another process holds the lock and `wait` is false.
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
        """Create an empty tree in place of the old one; the caller holds the lock."""
        self.remove()
        self.environment.mkdir(mode=0o700, parents=True)

    def complete(self, facts: EntryFacts) -> None:
        """Mark the entry as complete; the caller holds the lock and has flushed the contents."""
        facts = replace(facts, entries=_count_entries(self.environment))
        _write(self._root / _MARK, json.dumps(asdict(facts)))

    def remove(self) -> None:
        """Remove the entry; the caller holds the lock."""
        (self._root / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self._root, ignore_errors=True)


class EnvironmentStore:
    """The entries of one cache directory, which exists and belongs to this user."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def entry(self, digest: str) -> Entry:
        """Return the entry of a content, which may not exist yet."""
        return Entry(self.cache, digest)

    def find(self, archive: Path) -> Entry | None:
        """Return the complete entry of an archive that has not changed since `remember`."""
        try:
            digest = self._known(archive, archive.stat()).read_text()
        except OSError:
            return None
        entry = self.entry(digest)
        return entry if entry.facts() is not None else None

    def remember(self, archive: Path, status: os.stat_result, digest: str) -> None:
        """Record the digest of an archive with the state `status`, so that `find` need not read it.

        Nothing is recorded where it cannot be written: the archive is read again then.
        """
        if time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) < _TIME_GRANULARITY_NS:
            return
        known = self.cache / _KNOWN
        with suppress(OSError):
            known.mkdir(mode=0o700, exist_ok=True)
            self._forget_removed(known)
            _write(self._known(archive, status), digest)

    def _forget_removed(self, known: Path) -> None:
        """Remove the records of environments that are gone."""
        for path in known.iterdir():
            if path.suffix:
                # Another process is writing it.
                continue
            try:
                forgotten = not self.entry(path.read_text()).environment.exists()
            except FileNotFoundError:
                continue
            if forgotten:
                path.unlink(missing_ok=True)

    def remove_orphans(self) -> None:
        """Remove incomplete entries that no process is unpacking."""
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


def is_whole(environment: Path) -> bool:
    """Return whether the tree of a store's entry is complete."""
    root = environment.parent
    return Entry(root.parent, root.name).facts() is not None


def open_store(configured: Path | None) -> EnvironmentStore:
    """Return the store in the configured directory or the default; see :func:`open_cache`."""
    option = "--backend-config=python,environment-cache=DIR"
    purpose = "environments cannot be unpacked to"
    return EnvironmentStore(open_cache("environments", configured, purpose, option))


def _count_entries(tree: Path) -> int:
    """Count the entries of a tree, itself included, without bytecode caches, which stubs write."""
    count = 0
    folders = [str(tree)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                count += 1
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        count += 1
                    elif entry.name != _BYTECODE:
                        folders.append(entry.path)
        except OSError:
            continue
    return count


def _write(path: Path, text: str) -> None:
    """Write a small file atomically."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
