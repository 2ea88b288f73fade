"""The state of a model's files: what tells that a model has changed, and which versions of it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from gpubridge.config import CONFIG_FILENAME, available_versions
from gpubridge.errors import BridgeError

__all__ = ["FileStates", "ModelFiles", "model_directories", "read_model_files"]

FileStates = tuple[tuple[str, int, int], ...]
"""Path, time of the last change in nanoseconds, and bytes, of each file."""

_NOT_THE_MODELS = "__pycache__"
"""What the interpreter writes beside a model is no change of it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model's directory were like when they were looked at.

    Attributes
    ----------
    config : FileStates
        Of config.pbtxt; none when there is no such file.
    shared : FileStates
        Of what is in no version's directory, config.pbtxt excepted.
    versions : dict of int to FileStates
        Of each version's directory.
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


def model_directories(directory: Path) -> list[Path]:
    """Return the directories of the models in a repository, by name.

    Raises
    ------
    OSError
        When the repository cannot be listed.
    """
    entries = sorted(directory.iterdir())
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
