"""What a model raises, as its developer wants to see it: Python's own traceback, or a debugger there."""

from __future__ import annotations

import bdb
import pdb
import sys
import traceback
from pathlib import Path
from types import TracebackType

import gpubridge

__all__ = ["enter_debugger", "print_traceback"]

_PACKAGE = str(Path(gpubridge.__file__).parent) + "/"


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error from the model's first line on."""
    own = _of_the_model(error.__traceback__)
    if own is None:
        # The bridge's own words for what the model did; there is no line to show.
        return
    sys.stdout.flush()
    traceback.print_exception(type(error), error, own)


def enter_debugger(error: BaseException) -> None:
    """Print the traceback and open pdb where the error was raised; returns when that is left."""
    print_traceback(error)
    own = _of_the_model(error.__traceback__)
    if own is not None and not isinstance(error, bdb.BdbQuit):
        pdb.post_mortem(own)


def _of_the_model(place: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of the bridge that called the model."""
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen importlib.")):
            return place
        place = place.tb_next
    return None
