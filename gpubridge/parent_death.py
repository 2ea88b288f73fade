"""Processes that end with the server that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(server: int) -> None:
    """Have the kernel kill this process when the server ends, even one that hangs; end it if that has ended.

    ``server``: the process id of the parent, whose thread that started this one lives as long as it.
    """
    die_with_parent()
    if os.getppid() != server:
        sys.exit(0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, if that has not ended before the call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
