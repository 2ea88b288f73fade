"""Timeouts of an HTTP connection, checked periodically, so that a request costs nothing."""

from __future__ import annotations

import enum

from gpubridge.config import HttpConnections
from gpubridge.frontend.lateness import Rate, Unsent, Waiting

_LINGER_SECONDS = 10.0


class Stage(enum.IntEnum):
    """The part of a message that is on its way, by the numbers of `HttpConnectionState.progress`."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class Late(enum.Enum):
    """Phase of a connection that took too long."""

    HEAD = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()


class Watch:
    """The time-outs of one connection."""

    def __init__(self, limits: HttpConnections) -> None:
        self._head = Waiting(limits.header_timeout)
        self._body = Rate(limits.body_timeout)
        self._idle = Waiting(limits.idle_timeout)
        self._sending = Unsent(limits.send_timeout)
        self._lingering = Waiting(_LINGER_SECONDS)

    def stuck(self, now: float, unsent: int, *, closing: bool) -> bool:
        """Return whether the client neither takes what is sent, nor closes when all is said."""
        slow = self._sending.too_slow(now, unsent)
        return self._lingering.too_long(now, True if closing and not unsent else None) or slow

    def late(
        self, now: float, progress: tuple[int, int, int], served: int, *, idle: bool
    ) -> Late | None:
        """Return what is late of the request that is on its way, or of the next one.

        ``progress``: what `HttpConnectionState.progress` returned.
        """
        stage, message, nbytes = progress
        if self._head.too_long(now, message if stage == Stage.HEAD else None):
            return Late.HEAD
        if self._body.too_slow(now, message if stage == Stage.BODY else None, nbytes, nbytes):
            return Late.BODY
        waits = idle and stage == Stage.NOTHING
        return Late.IDLE if self._idle.too_long(now, served if waits else None) else None
