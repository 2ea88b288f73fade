"""What commands tell the developer: steps with their times, and why a command failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

__all__ = ["Failed", "run_steps", "say", "timed"]


class Failed(Exception):
    """A command cannot go on, or has found something; its text is for the developer."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"==> {text}", file=sys.stderr, flush=True)


@contextmanager
def timed(text: str) -> Iterator[None]:
    """Print what begins, and how long it took when it has ended well."""
    say(text)
    started = time.monotonic()
    yield
    say(f"done in {time.monotonic() - started:.1f} s: {text}")


def run_steps(steps: Iterable[tuple[str, Callable[[], bool]]], advice: str) -> None:
    """Run every step, whether others fail or not.

    Parameters
    ----------
    steps
        Names, and functions that return whether their step passed; one that raises `Failed` did not.
    advice
        What to do about a failure, the end of the error's text.

    Raises
    ------
    Failed
        A step did not pass.
    """
    failed = []
    for name, step in steps:
        say(name)
        try:
            passed = step()
        except Failed as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            passed = False
        if not passed:
            failed.append(name)
    if failed:
        raise Failed(f"{', '.join(failed)}: {advice}")
