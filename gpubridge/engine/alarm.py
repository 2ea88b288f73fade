"""A timer for delays of microseconds: those of the event loop's own timers are whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls back once at a time of CLOCK_MONOTONIC; owns a timer of the kernel's (timerfd).

    Raises OSError when there is no descriptor left.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer can be made")
        self._on_due = on_due
        self._due = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    def set(self, due_ns: int) -> None:
        """Ring at ``due_ns``, at once if that is past; an earlier time that was set stays."""
        if self._due and self._due <= due_ns:
            return
        self._due = due_ns
        # A time of zero would stop the timer.
        seconds, nanoseconds = divmod(max(due_ns, 1), _NS)
        value = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def close(self) -> None:
        """Ring no more; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._due = 0
        self._on_due()
