"""Waits for a device that sleep: CUDA's own keep a processor busy for as long as they take.

A short copy is asked about for a moment first, since to sleep and be woken takes longer than it does.
"""

from __future__ import annotations

import time
from typing import Callable

_POLL = 50e-6
_SHARE = 8
_LONGEST_PAUSE = 0.02


def soon(done: Callable[[], bool]) -> bool:
    """Ask for a moment; return whether it is done. Takes so much of a processor for each wait."""
    end = time.perf_counter() + _POLL
    while not done():
        if time.perf_counter() >= end:
            return False
    return True


def sleep_until(done: Callable[[], bool]) -> None:
    """Ask again and again, at most an eighth of the time later that has passed by then."""
    if soon(done):
        return
    began = time.perf_counter() - _POLL
    while not done():
        pause = (time.perf_counter() - began) / _SHARE
        time.sleep(min(pause, _LONGEST_PAUSE))
