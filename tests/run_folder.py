"""A folder that all workers of a run of tests share. A plugin of pytest."""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["locked", "path"]

_KEY = "gpubridge_run"
_given: list[str] = []


def path() -> Path:
    """Return the folder; where no other process made it, this one does, and removes it at its end."""
    return Path(_run())


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made, against other processes of the run."""
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def pytest_configure(config) -> None:
    """Take the folder of a worker's controller."""
    given = getattr(config, "workerinput", {}).get(_KEY)
    if given:
        _given[:] = [given]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Give a worker the folder."""
    node.workerinput[_KEY] = _run()


def _run() -> str:
    if not _given:
        folder = tempfile.mkdtemp(prefix="gpubridge-tests-")
        _given.append(folder)
        atexit.register(_remove, folder, os.getpid())
    return _given[0]


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)
