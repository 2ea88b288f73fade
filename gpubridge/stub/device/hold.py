"""What holds device memory for tensors, until nobody looks at it any more."""

from __future__ import annotations

from collections import deque

__all__ = ["DeviceHold"]


class DeviceHold:
    """Holds device memory for tensors: a slot of the arena, or memory that is lent to this stub.

    Attributes
    ----------
    kept : object
        What goes back.
    streams : set of int
        Those that may use the memory.
    """

    __slots__ = ("__weakref__", "_over", "kept", "streams")

    def __init__(self, kept: object, over: deque[tuple[object, set[int]]]) -> None:
        self.kept = kept
        self.streams: set[int] = set()
        self._over = over

    def __del__(self) -> None:
        self._over.append((self.kept, self.streams))
