"""Whether a stub takes too long: for one ``execute``, or to begin one."""

from __future__ import annotations

import time

from gpubridge.dataplane import InFlightRequests
from gpubridge.transport.control import ControlPage


class ExecuteWatch:
    """Looks at a stub's progress when asked."""

    def __init__(self, control: ControlPage, in_flight: InFlightRequests) -> None:
        self._control = control
        self._in_flight = in_flight
        self._stalled_at: tuple[int, int] | None = None

    def overdue(self, seconds: float) -> str | None:
        """Say what has taken longer than ``seconds``, if anything has."""
        busy = self._busy_since()
        if busy is None:
            return None
        since, executing = busy
        if time.monotonic_ns() - since <= seconds * 1e9:
            return None
        return "execute ran" if executing else "no execute began for"

    def _busy_since(self) -> tuple[int, bool] | None:
        """Since when (CLOCK_MONOTONIC ns) the stub is at what it does, and whether that is ``execute``.

        Else it has work and starts on none of it: that is seen only by asking again and again.
        None when it has nothing to do.
        """
        started = self._control.started
        if self._in_flight.holds(started):
            return self._control.started_at, True
        if self._in_flight.idle:
            self._stalled_at = None
            return None
        if self._stalled_at is None or self._stalled_at[0] != started:
            self._stalled_at = (started, time.monotonic_ns())
        return self._stalled_at[1], False
