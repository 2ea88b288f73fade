"""The state of a model's files: what tells that a model has changed, and which versions of it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from gpubridge.config import CONFIG_FILENAME, available_versions
from gpubridge.errors import BridgeError, invalid, unavailable

FileStates = tuple[tuple[str, int, int], ...]
"""Path, time of the last change in nanoseconds, and bytes, of each file."""

_NOT_THE_MODELS = "__pycache__"
"""Directory of the interpreter's cache, whose files are no change of a model."""

_logger = logging.getLogger(__name__)

_MODEL_NAME = re.compile(r"(?!\.)[^/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_PREFIX = "gpubridge-models-"
_LOCK = "lock"
_LAST_WRITE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Snapshot of the files of a model's directory.

    - ``config``: of config.pbtxt; none when there is no such file.
    - ``shared``: of what is in no version's directory, config.pbtxt excepted.
    - ``versions``: of each version's directory.
    """

    config: FileStates = ()
    shared: FileStates = ()
    versions: dict[int, FileStates] = field(default_factory=dict)


def read_model_files(directory: Path) -> ModelFiles:
    """Look at every file of a model, links followed; what cannot be read is passed over.

    Takes as long as the directory is large: not for the event loop.
    """
    try:
        versions = {str(version): version for version in available_versions(directory)}
    except BridgeError:
        return ModelFiles()
    parts: dict[str, list[tuple[str, int, int]]] = {name: [] for name in versions}
    config: list[tuple[str, int, int]] = []
    shared: list[tuple[str, int, int]] = []
    for path, changed, nbytes in _states(directory):
        first = path.partition(os.sep)[0]
        part = config if path == CONFIG_FILENAME else parts.get(first, shared)
        part.append((path, changed, nbytes))
    return ModelFiles(
        tuple(sorted(config)),
        tuple(sorted(shared)),
        {number: tuple(sorted(parts[name])) for name, number in versions.items()},
    )


def _states(directory: Path) -> list[tuple[str, int, int]]:
    states = []
    # Links to directories are followed, as repositories are made of them; each is entered once.
    entered = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(directory / folder) as entries:
                for entry in entries:
                    if entry.name == _NOT_THE_MODELS:
                        continue
                    path = f"{folder}{os.sep}{entry.name}" if folder else entry.name
                    try:
                        status = entry.stat()
                    except OSError:
                        continue
                    if not stat.S_ISDIR(status.st_mode):
                        states.append((path, status.st_mtime_ns, status.st_size))
                    elif (status.st_dev, status.st_ino) not in entered:
                        entered.add((status.st_dev, status.st_ino))
                        folders.append(path)
        except OSError:
            continue
    return states


def list_repository(directory: Path) -> dict[Path, bool]:
    """Return the directories in a repository, and links, for which it is true; raises OSError.

    A link may lead to a mount that does not answer: none is followed.
    """
    with os.scandir(directory) as entries:
        return {
            Path(entry.path): entry.is_symlink()
            for entry in sorted(entries, key=lambda entry: entry.name)
            if _is_model_entry(entry.name)
            and (entry.is_symlink() or entry.is_dir(follow_symlinks=False))
        }


def is_model_name(name: str) -> bool:
    """Return whether a directory of that name may be a model's."""
    return _MODEL_NAME.fullmatch(name) is not None


@cache
def _is_model_entry(name: str) -> bool:
    """Return whether an entry of a repository may be a model's; warns once of an unusable name."""
    if not is_model_name(name) and not name.startswith("."):
        _logger.warning(
            "%s is no model: its name is not UTF-8, so no client can ask for it, or has control "
            "characters",
            ascii(name),
        )
    return is_model_name(name)


class OverrideDirectory:
    """The files of one load; who made it holds it, and it goes when nobody does any more.

    ``model``: takes the place of the model's directory in the repository, and has its name.
    """

    def __init__(self, root: Path, model: Path) -> None:
        self.model = model
        self._root = root
        self._holders = 1

    def hold(self) -> None:
        """Need the files, until :meth:`release`."""
        self._holders += 1

    def release(self) -> None:
        """Need the files no more; they go with the last who did."""
        self._holders -= 1
        if not self._holders:
            shutil.rmtree(self._root, ignore_errors=True)


class FileOverrides:
    """Makes directories of the files that clients send; owns what is left of them when it closes.

    Any thread may write.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1
        self._turn = threading.Lock()
        self._closed = False

    def write(self, name: str, files: Mapping[str, bytes | memoryview]) -> OverrideDirectory:
        """Write the files of a model.

        ``files``: contents by ``file:<version>/<path>``.

        Raises BridgeError: INVALID_ARG for a path that leaves the model's directory or cannot be
        written.
        """
        paths = {key: _path(key) for key in files}
        with self._turn:
            return self._write(name, files, paths)

    def _write(
        self, name: str, files: Mapping[str, bytes | memoryview], paths: Mapping[str, PurePosixPath]
    ) -> OverrideDirectory:
        try:
            root = Path(tempfile.mkdtemp(dir=self._open_root()))
        except OSError as error:
            raise unavailable(
                f"there is no place for the files: {error}; set TMPDIR to a directory that the server "
                "can write to"
            ) from error
        directory = OverrideDirectory(root, root / name)
        try:
            directory.model.mkdir()
            for key, content in files.items():
                path = directory.model / paths[key]
                path.parent.mkdir(parents=True, exist_ok=True)
                # Each path is new: two names of one file would be two contents.
                with path.open("xb") as file:
                    file.write(content)
        except (OSError, ValueError) as error:
            directory.release()
            raise invalid(
                f"Invalid file parameter '{key}': it cannot be written: {error}"
            ) from error
        return directory

    def close(self) -> None:
        """Remove everything, once what is being written is, or hangs; idempotent."""
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
            # Locked before it has the name under which others look for it.
            mine = root / f"{_LOCK}.new"
            self._lock = os.open(mine, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            mine.rename(root / _LOCK)
            self._root = root
        return self._root


def files_digest(files: Mapping[str, bytes | memoryview]) -> str:
    """Return what tells one set of files from another."""
    digest = hashlib.sha256()
    for key, content in sorted(files.items()):
        digest.update(b"%d %d " % (len(key.encode()), len(content)))
        digest.update(key.encode())
        digest.update(content)
    return digest.hexdigest()


def _path(key: str) -> PurePosixPath:
    """Return the path that a parameter ``file:<path>`` names in the model's directory.

    A slash before it says nothing, as in Triton.
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
    """Remove what servers that were killed have left behind."""
    for root in folder.glob(f"{_PREFIX}*"):
        try:
            status = root.lstat()
            if status.st_uid != os.getuid() or root.is_symlink():
                continue
            if _is_owned(root):
                continue
        except OSError:
            continue
        _logger.info("removing %s, which a server that was killed has left behind", root)
        shutil.rmtree(root, ignore_errors=True)


def _is_owned(root: Path) -> bool:
    try:
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Nothing is in it yet: its maker may be about to lock it.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
