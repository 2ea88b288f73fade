"""Leases that outlast their requests since streams of a GPU still use the memory: looked at soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["LateLeases"]

_FIRST_LOOK = 0.001
_LONGEST_LOOK = 0.064
_LOOKS = 40
"""About two seconds; whoever keeps memory longer than that keeps it on purpose."""


class LateLeases:
    """Looks whether they are over, at first often: others wait for that memory.

    Parameters
    ----------
    look : callable
        Takes back what is; returns whether some is left.
    """

    __slots__ = ("_handle", "_left", "_look", "_pause")

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._pause = 0.0
        self._left = 0
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is one more."""
        self._left = _LOOKS
        self._pause = _FIRST_LOOK
        if self._handle is None:
            self._again()

    def close(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._left = 0

    def _again(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._pause, self._take)

    def _take(self) -> None:
        self._handle = None
        self._left -= 1
        self._pause = min(2 * self._pause, _LONGEST_LOOK)
        if self._look() and self._left > 0:
            self._again()
