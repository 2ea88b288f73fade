"""Model files that a client sends when it loads a model: kept in a private directory while served.

All of them lie in one directory, which only this user can enter, in the system's directory for
temporary files. It goes when the server stops. A server that is killed leaves it behind; the next
one that needs such a directory removes it: a lock tells that nobody owns it any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["FileOverrides", "OverrideDirectory", "files_digest"]

_logger = logging.getLogger(__name__)

_PREFIX = "gpubridge-models-"
_LOCK = "lock"


class OverrideDirectory:
    """The files of one load; who made it holds it, and it goes when nobody does any more.

    Attributes
    ----------
    model : Path
        Takes the place of the model's directory in the repository, and has its name.
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

    def write(self, name: str, files: Mapping[str, bytes]) -> OverrideDirectory:
        """Write the files of a model.

        Parameters
        ----------
        files : mapping of str to bytes
            Contents by ``file:<version>/<path>``.

        Raises
        ------
        BridgeError
            INVALID_ARG for a path that leaves the model's directory or cannot be written.
        """
        paths = {key: _path(key) for key in files}
        with self._turn:
            return self._write(name, files, paths)

    def _write(
        self, name: str, files: Mapping[str, bytes], paths: Mapping[str, PurePosixPath]
    ) -> OverrideDirectory:
        try:
            root = Path(tempfile.mkdtemp(dir=self._open_root()))
        except OSError as error:
            raise BridgeError(
                f"there is no place for the files: {error}; set TMPDIR to a directory that the server "
                "can write to",
                ErrorCode.UNAVAILABLE,
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
            raise BridgeError(
                f"Invalid file parameter '{key}': it cannot be written: {error}",
                ErrorCode.INVALID_ARG,
            ) from error
        return directory

    def close(self) -> None:
        """Remove everything, once what is being written is; idempotent."""
        with self._turn:
            self._closed = True
            root, self._root = self._root, None
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(self._lock)

    def _open_root(self) -> Path:
        if self._closed:
            raise BridgeError("the server is stopping", ErrorCode.UNAVAILABLE)
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


def files_digest(files: Mapping[str, bytes]) -> str:
    """Return what tells one set of files from another."""
    digest = hashlib.sha256()
    for key, content in sorted(files.items()):
        digest.update(b"%d %d " % (len(key.encode()), len(content)))
        digest.update(key.encode())
        digest.update(content)
    return digest.hexdigest()


def _path(key: str) -> PurePosixPath:
    """Return the path that a parameter ``file:<path>`` names, relative to the model's directory."""
    text = key.removeprefix("file:")
    path = PurePosixPath(text)
    if not path.parts or "\0" in text or path.is_absolute() or ".." in path.parts:
        raise BridgeError(
            f"Invalid file parameter '{key}' with normalized path '{os.path.normpath(text)}' must "
            "stay within model directory: expected file:<version>/<path>",
            ErrorCode.INVALID_ARG,
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
