"""Models whose import takes a second: what a server with several of them is started with."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["write_models"]

MODELS = 10
IMPORT_SECONDS = 1.0


def write_models(model: Path, repository: Path) -> Path:
    """Write ten copies of a model whose import takes a second longer; returns the repository.

    The second is slept: how well a server overlaps imports shows on any number of processors.
    """
    shutil.rmtree(repository, ignore_errors=True)
    for number in range(MODELS):
        copy = repository / f"{model.name}_{number}"
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns("__pycache__"))
        config = copy / "config.pbtxt"
        config.write_text(config.read_text().replace(f'"{model.name}"', f'"{copy.name}"'))
        source = copy / "1" / "model.py"
        slow = f"import time\n\ntime.sleep({IMPORT_SECONDS})\n"
        source.write_text(source.read_text() + slow)
    return repository
