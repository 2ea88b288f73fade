"""Programs that commands run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["find_program", "output_of", "run"]

# Each becomes a string: paths do.
Words = Iterable[object]


def run(
    command: Words,
    *,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    log: Path | None = None,
    quiet: bool = False,
) -> int:
    """Run a program to its end; return its exit status.

    A terminal sends Ctrl-C to the program, too: it ends by itself, and is waited for. SIGTERM, which only this
    process gets, is passed on.

    Parameters
    ----------
    variables
        The program's whole environment; this process's where there is none.
    log
        A file that takes its output.
    quiet
        Whether its output is of no interest.
    """
    words = [str(word) for word in command]
    if log is not None:
        with log.open("wb") as file:
            child = subprocess.Popen(
                words, cwd=cwd, env=variables, stdout=file, stderr=subprocess.STDOUT
            )
    else:
        stream = subprocess.DEVNULL if quiet else None
        child = subprocess.Popen(words, cwd=cwd, env=variables, stdout=stream, stderr=stream)
    with child:
        try:
            return child.wait()
        except SystemExit:
            child.terminate()
            child.wait()
            raise
        except KeyboardInterrupt:
            child.wait()
            raise


def output_of(command: Words, cwd: Path | None = None) -> str:
    """Return what a program prints, without the space around it; "" where it fails or cannot be run."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def find_program(*names: str) -> str | None:
    """Return the path of the first of these programs that there is."""
    return next(filter(None, map(shutil.which, filter(None, names))), None)
