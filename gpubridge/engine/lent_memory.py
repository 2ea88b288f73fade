"""Slots of requests that several hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SharedSlot:
    """A slot that goes back to its arena when nobody refers to this object any more."""

    __slots__ = ("_free", "slot")

    def __init__(self, free: Callable[[Any], None], slot: Any) -> None:
        self._free = free
        self.slot = slot

    def __del__(self) -> None:
        self._free(self.slot)
