"""Wakes the stub's main thread when another thread leaves it work on the GPU to look after."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """An eventfd that the main thread polls beside its channel while it has nothing to do.

    - ``descriptor``: readable after `wake`, until `clear`.
    - ``armed``: whether the main thread waits without a time limit. It sets this before it looks
      whether there is work, so that work which comes later wakes it.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.armed = False

    def wake(self, *, always: bool = False) -> None:
        """Wake the main thread if it waits, or in any case; any thread and finalizers may use this."""
        if self.armed or always:
            self.armed = False
            os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget that the main thread was to be woken."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
