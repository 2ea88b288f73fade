"""State of a model's files, to detect changes, and files that clients send with a load."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePosixPath

from gpubridge.config import CONFIG_FILENAME, available_versions
from gpubridge.errors import BridgeError, invalid, unavailable

FileStates = tuple[tuple[str, int, int], ...]
"""Path, modification time in nanoseconds, and bytes, of each file; see `file_states` for links."""

IGNORED_FOLDER = "__pycache__"
"""The interpreter's cache, whose files are no change of a model."""

_logger = logging.getLogger(__name__)

_MODEL_NAME = re.compile(r"(?!\.)[^/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_NO_MODELS = ("lost+found", IGNORED_FOLDER)
"""Folders that file systems and the interpreter make."""
_PREFIX = "gpubridge-models-"
_LOCK = "lock"
_LAST_WRITE_SECONDS = 5.0
_BAD_PATH = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors of a path that cannot be a file's; all others are the disk's."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Snapshot of the files of a model's directory.

    - ``config``: state of config.pbtxt; empty without that file.
    - ``shared``: state of other files outside the versions' directories.
    - ``versions``: state of each version's directory.
    """

    config: FileStates = ()
    shared: FileStates = ()
    versions: dict[int, FileStates] = field(default_factory=dict)


def read_model_files(directory: Path) -> ModelFiles:
    """Read the state of every file of a model; follows links, skips unreadable entries.

    Not for the event loop: the directory may be large.
    """
    try:
        versions = {str(version): version for version in available_versions(directory)}
    except BridgeError:
        return ModelFiles()
    parts: dict[str, list[tuple[str, int, int]]] = {name: [] for name in versions}
    config: list[tuple[str, int, int]] = []
    shared: list[tuple[str, int, int]] = []
    for path, changed, nbytes in file_states(directory):
        first = path.partition(os.sep)[0]
        part = config if path == CONFIG_FILENAME else parts.get(first, shared)
        part.append((path, changed, nbytes))
    return ModelFiles(
        tuple(sorted(config)),
        tuple(sorted(shared)),
        {number: tuple(sorted(parts[name])) for name, number in versions.items()},
    )


def file_states(directory: Path) -> list[tuple[str, int, int]]:
    """Return the states of all files in a directory, as `FileStates` has them.

    Links to directories, which repositories often contain, are followed, and listed by the device and
    inode of what they lead to. What two entries of ``directory`` (versions, for example) both lead to is
    listed for each of them; within one of them a directory is entered once.
    """
    states = []
    entered = set()
    # The path of each folder and the entry of `directory` that it is reached by.
    folders = [("", "")]
    while folders:
        folder, top = folders.pop()
        try:
            with os.scandir(directory / folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name == IGNORED_FOLDER:
                        continue
                    path = f"{folder}{os.sep}{entry.name}" if folder else entry.name
                    try:
                        status = entry.stat()
                    except OSError:
                        continue
                    if not stat.S_ISDIR(status.st_mode):
                        states.append((path, status.st_mtime_ns, status.st_size))
                        continue
                    place = top or entry.name, status.st_dev, status.st_ino
                    if place in entered or entry.is_symlink():
                        states.append((path, status.st_dev, status.st_ino))
                    if place not in entered:
                        entered.add(place)
                        folders.append((path, place[0]))
        except OSError:
            continue
    return states


def list_repository(directory: Path) -> dict[Path, bool]:
    """Return the directories and links in a repository, True for links; raises OSError.

    Does not follow links: they may lead to a mount that does not respond.
    """
    with os.scandir(directory) as entries:
        return {
            Path(entry.path): entry.is_symlink()
            for entry in sorted(entries, key=lambda entry: entry.name)
            if is_model_entry(entry.name)
            and (entry.is_symlink() or entry.is_dir(follow_symlinks=False))
        }


def is_model_name(name: str) -> bool:
    """Return whether a name is valid for a model directory."""
    return _MODEL_NAME.fullmatch(name) is not None and name not in _NO_MODELS


@cache
def is_model_entry(name: str) -> bool:
    """Return whether an entry of a repository may be a model; warn once about an unusable name."""
    if not is_model_name(name) and not name.startswith(".") and name not in _NO_MODELS:
        _logger.warning(
            "%s is no model: its name is not UTF-8, so no client can ask for it, or has control "
            "characters",
            ascii(name),
        )
    return is_model_name(name)


class HeldDirectory:
    """A reference-counted directory of a model; its creator has the first reference.

    - ``model``: the directory, with the model's name.
    - ``free``: called when the last reference is dropped.
    """

    def __init__(self, model: Path, free: Callable[[], object]) -> None:
        self.model = model
        self._free = free
        self._references = 1

    def hold(self) -> None:
        """Add a reference."""
        self._references += 1

    def release(self) -> None:
        """Drop a reference."""
        self._references -= 1
        if not self._references:
            self._free()


class FileOverrides:
    """Writes files that clients send to directories, and removes the remaining ones on close.

    `write` may be called on any thread.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1
        self._turn = threading.Lock()
        self._closed = False

    def write(self, name: str, files: Mapping[str, bytes | memoryview]) -> HeldDirectory:
        """Write the files of a model; the last release of the directory removes them.

        ``files``: contents by ``file:<version>/<path>``.

        Raises BridgeError: INVALID_ARG for a path that leaves the model's directory or cannot be one,
        UNAVAILABLE where the disk does not take the files.
        """
        paths = {key: _path(key) for key in files}
        with self._turn:
            return self._write(name, files, paths)

    def _write(
        self, name: str, files: Mapping[str, bytes | memoryview], paths: Mapping[str, PurePosixPath]
    ) -> HeldDirectory:
        try:
            root = Path(tempfile.mkdtemp(dir=self._open_root()))
        except OSError as error:
            raise _not_stored(error) from error
        directory = HeldDirectory(root / name, partial(shutil.rmtree, root, ignore_errors=True))
        try:
            directory.model.mkdir()
            for key, content in files.items():
                path = directory.model / paths[key]
                path.parent.mkdir(parents=True, exist_ok=True)
                # "x": two parameters for one path are an error.
                with path.open("xb") as file:
                    file.write(content)
        except (OSError, ValueError) as error:
            directory.release()
            if isinstance(error, OSError) and error.errno not in _BAD_PATH:
                raise _not_stored(error) from error
            raise invalid(
                f"Invalid file parameter '{key}': it cannot be written: {error}"
            ) from error
        return directory

    def close(self) -> None:
        """Remove everything, after waiting a limited time for a write in progress; idempotent."""
        if self._turn.acquire(timeout=_LAST_WRITE_SECONDS):
            try:
                self._closed = True
                root, self._root = self._root, None
                if root is not None:
                    shutil.rmtree(root, ignore_errors=True)
                    os.close(self._lock)
            finally:
                self._turn.release()

    def _open_root(self) -> Path:
        if self._closed:
            raise unavailable("the server is stopping")
        if self._root is None:
            _remove_orphans(Path(tempfile.gettempdir()))
            root = Path(tempfile.mkdtemp(prefix=_PREFIX))
            try:
                self._lock = _locked(root)
            except OSError:
                shutil.rmtree(root, ignore_errors=True)
                raise
            self._root = root
        return self._root


def _locked(root: Path) -> int:
    """Lock a new directory; returns the descriptor that holds the lock."""
    # Locked before it gets the name that other servers check.
    mine = root / f"{_LOCK}.new"
    lock = os.open(mine, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mine.rename(root / _LOCK)
    except OSError:
        os.close(lock)
        raise
    return lock


def _not_stored(error: OSError) -> BridgeError:
    return unavailable(
        f"the files cannot be stored: {error}; free space there, or set TMPDIR to a directory that the "
        "server can write to"
    )


def files_digest(files: Mapping[str, bytes | memoryview]) -> str:
    """Return a hash of a set of files."""
    digest = hashlib.sha256()
    for key, content in sorted(files.items()):
        digest.update(b"%d %d " % (len(key.encode()), len(content)))
        digest.update(key.encode())
        digest.update(content)
    return digest.hexdigest()


def _path(key: str) -> PurePosixPath:
    """Return the path that a parameter ``file:<path>`` names in the model's directory.

    Leading slashes are ignored, as in Triton.
    """
    text = key.removeprefix("file:")
    path = PurePosixPath(text.lstrip("/"))
    if not path.parts or "\0" in text or ".." in path.parts:
        raise invalid(
            f"Invalid file parameter '{key}' with normalized path '{os.path.normpath(text)}' must "
            "stay within model directory: expected file:<version>/<path>"
        )
    return path


def _remove_orphans(folder: Path) -> None:
    """Remove directories of servers that were killed."""
    for root in folder.glob(f"{_PREFIX}*"):
        try:
            status = root.lstat()
            if status.st_uid != os.getuid() or root.is_symlink():
                continue
            if _is_owned(root):
                continue
        except OSError:
            continue
        _logger.info("removing %s of a server that was killed", root)
        shutil.rmtree(root, ignore_errors=True)


def _is_owned(root: Path) -> bool:
    try:
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Its creator may be about to lock it.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
