"""Virtual environments with given packages, for servers and models that run on a Python of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpubridge.errors import unavailable

_RECORD = "gpubridge-bench.json"
# A download over a slow line may take long, but not for ever.
_SECONDS = 1800


def make_environment(folder: Path, python: str, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment in ``folder``; one with these packages is kept.

    ``python`` may be that of another environment: the new one is made of what that was made of.

    Raises
    ------
    BridgeError
        If ``python`` makes none, or a package cannot be installed; the reason is pip's.
    """
    base = str(Path(shutil.which(python) or python).resolve())
    record, wanted = folder / _RECORD, json.dumps([base, *packages])
    interpreter = folder / "bin" / "python"
    if record.exists() and record.read_text() == wanted:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    _run([base, "-m", "venv", str(folder)], folder)
    _run([str(interpreter), "-m", "pip", "install", "--quiet", *packages], folder)
    record.write_text(wanted)
    return interpreter


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise unavailable(f"environment {folder}: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else done.stderr.strip()[-300:]
        raise unavailable(f"environment {folder}: {' '.join(command[1:4])} ...: {reason}")
