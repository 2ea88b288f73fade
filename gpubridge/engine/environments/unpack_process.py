"""The process that unpacks one archive, so that it does not delay requests in the server.

It prints one JSON object per line: its activity and progress, and at the end the result. On SIGTERM it
removes partial contents; it dies with the server.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from gpubridge.engine.environments.archive import Unpacked, UnpackLimits, unpack
from gpubridge.engine.environments.store import Entry, EntryFacts, EnvironmentStore
from gpubridge.errors import BridgeError, ErrorCode, invalid, unavailable
from gpubridge.parent_death import die_with, die_with_parent

_CHUNK = 1024 * 1024
_TELL_EVERY = 0.5
_MEMORY_LIMIT = 2 * 1024 * 1024 * 1024
"""Bytes of address space: headers of an archive may ask for any amount."""

_CONDA_UNPACK_SECONDS = 600
_ERROR_LENGTH = 500


class _Stopped(BaseException):
    """The server has stopped this process."""


def main(arguments: list[str]) -> int:
    """Unpack an archive into the store; returns the exit code.

    ``arguments``: the archive, the store's directory, the limit of unpacked bytes, the server's
    process id.
    """
    archive, cache, limit, server = arguments
    die_with(int(server))
    signal.signal(signal.SIGTERM, _stop)
    os.umask(0o077)
    # Serving has priority.
    os.nice(5)
    progress = _Progress()
    try:
        facts, entry, unpacked = _unpack_entry(
            Path(archive), EnvironmentStore(Path(cache)), int(limit), progress
        )
    except BridgeError as error:
        _print({"error": error.message, "code": int(error.code)})
        return 1
    except OSError as error:
        _print(
            {
                "error": f"environment {archive} cannot be unpacked to {cache}: {error}",
                "code": int(ErrorCode.UNAVAILABLE),
            }
        )
        return 1
    except _Stopped:
        return 1
    _print(
        {
            "environment": str(entry.environment),
            "nbytes": facts.nbytes,
            "members": facts.members,
            "unpacked": unpacked,
        }
    )
    return 0


def _unpack_entry(
    archive: Path, store: EnvironmentStore, limit: int, progress: _Progress
) -> tuple[EntryFacts, Entry, bool]:
    """Return the complete entry of an archive, and whether it was made now."""
    with _open(archive) as packed:
        status = os.fstat(packed.fileno())
        digest = _digest(packed, status.st_size, progress)
        entry = store.entry(digest)
        lock = entry.lock(wait=False)
        if lock is None:
            progress.report("waiting", 0.0, Unpacked())
            lock = entry.lock(wait=True)
        assert lock is not None
        try:
            facts = entry.facts()
            fresh = facts is None
            if facts is None:
                store.remove_orphans()
                facts = _make(entry, archive, packed, limit, progress, lock)
            if _state(os.fstat(packed.fileno())) != _state(status):
                if fresh:
                    entry.remove()
                raise unavailable(
                    f"environment {archive} has changed while it was unpacked; load the model again"
                )
            store.remember(archive, status, digest)
        finally:
            os.close(lock)
    return facts, entry, fresh


def _make(
    entry: Entry, archive: Path, packed: BinaryIO, limit: int, progress: _Progress, lock: int
) -> EntryFacts:
    """Unpack into an entry; a failure removes partial contents."""
    size = os.fstat(packed.fileno()).st_size or 1
    packed.seek(0)
    try:
        entry.begin()
        with _limited_memory():
            done = unpack(
                packed,
                archive,
                entry.environment,
                UnpackLimits(limit),
                lambda done: progress.report("unpacking", packed.tell() / size, done),
            )
        if (entry.environment / "bin" / "conda-unpack").is_file():
            progress.report("running conda-unpack", 1.0, done, now=True)
            _conda_unpack(entry.environment, archive, lock)
        _flush(entry.environment)
        facts = EntryFacts(str(entry.environment), str(archive), done.nbytes, done.members)
        entry.complete(facts)
    except BaseException:
        entry.remove()
        raise
    return facts


def _open(archive: Path) -> BinaryIO:
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise invalid(f"environment {archive} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise invalid(f"environment {archive} is neither a directory nor a file")
    return os.fdopen(fd, "rb")


def _digest(packed: BinaryIO, size: int, progress: _Progress) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    read = 0
    while count := packed.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(memoryview(buffer)[:count])
        read += count
        progress.report("reading", read / max(size, 1), Unpacked())
    return digest.hexdigest()


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _conda_unpack(environment: Path, archive: Path, lock: int) -> None:
    """Run conda-unpack, which corrects the paths in the environment's files."""
    folder = environment / "bin"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    variables["PATH"] = f"{folder}:{variables.get('PATH', os.defpath)}"
    command = [str(folder / "python"), str(folder / "conda-unpack")]
    try:
        run = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A child that outlives this process keeps the lock.
            pass_fds=(lock,),
            timeout=_CONDA_UNPACK_SECONDS,
            check=False,
            # Safe, as there is one thread; the child must not outlive the server.
            preexec_fn=die_with_parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_prepared(archive, str(error)) from error
    if run.returncode:
        said = run.stdout.decode(errors="replace").strip()[-_ERROR_LENGTH:]
        raise _not_prepared(archive, f"it ended with code {run.returncode}: {said}")


def _not_prepared(archive: Path, why: str) -> BridgeError:
    return invalid(
        f"environment {archive} was unpacked, but its bin/conda-unpack failed: {why}; pack it anew with "
        "conda-pack on a machine of this kind"
    )


def _flush(folder: Path) -> None:
    """Flush to the disk, so that the mark is never there before the contents."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


class _limited_memory:  # noqa: N801  (reads as what it does)
    """Bounds the memory of this process while the block runs."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        hard = self._before[1]
        limit = _MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(_MEMORY_LIMIT, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


class _Progress:
    """Prints the progress at intervals."""

    def __init__(self) -> None:
        self._next = 0.0

    def report(self, what: str, part: float, done: Unpacked, *, now: bool = False) -> None:
        clock = time.monotonic()
        if now or clock >= self._next or what == "waiting":
            self._next = clock + _TELL_EVERY
            _print(
                {"doing": what, "part": part, "nbytes": done.nbytes, "members": done.members},
            )


def _print(fields: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise _Stopped from None


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    # Ignore further signals: the removal must complete.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped
