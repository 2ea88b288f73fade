"""What holds device memory for tensors, until nobody looks at it any more."""

from __future__ import annotations

from collections import deque
from typing import Optional

from gpubridge.cuda_ipc import CopyMark

__all__ = ["DeviceHold", "Over"]

Over = deque[tuple[object, set[int], Optional[CopyMark]]]
"""What nobody looks at any more, with the streams that used it and the upload that filled it."""


class DeviceHold:
    """Holds device memory for tensors: a slot of the arena, or memory that is lent to this stub.

    Attributes
    ----------
    kept : object
        What goes back.
    streams : set of int
        Those that may use the memory.
    filled : CopyMark or None
        Where an upload into the memory ends.
    """

    __slots__ = ("__weakref__", "_over", "filled", "kept", "streams")

    def __init__(self, kept: object, over: Over) -> None:
        self.kept = kept
        self.streams: set[int] = set()
        self.filled: CopyMark | None = None
        self._over = over

    def __del__(self) -> None:
        self._over.append((self.kept, self.streams, self.filled))
