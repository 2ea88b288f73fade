"""Timeouts of a gRPC connection, checked periodically, so that a call costs nothing."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence

from gpubridge.config import GrpcConnections
from gpubridge.dataplane import Http2Connection
from gpubridge.frontend.lateness import Rate, Unsent, Waiting

_IDLE_INTERVAL = 7200.0
"""Seconds between a client's PINGs while it has no call open, unless those are permitted."""

_GOODBYE_SECONDS = 5.0
_AGE_SPREAD = 0.1


class Finding(enum.Enum):
    """Outcome of a check of a connection."""

    #: The client has not begun as HTTP/2 begins.
    UNSTARTED = enum.auto()
    #: It has had no call for long, or it is old: ask the client to leave.
    LEAVE = enum.auto()
    #: It does not take what is sent, is dead, or did not leave: end it at once.
    END = enum.auto()
    #: Ask the client for a sign of life.
    PING = enum.auto()


class Keepalive:
    """The PINGs of one connection, both ways; gRPC's rules.

    ``now``: seconds, as in all methods.
    """

    def __init__(self, limits: GrpcConnections, now: float) -> None:
        self._limits = limits
        # When something came from the client; when it was asked for a sign of life.
        self._seen = now
        self._pinged: float | None = None
        self._pings = 0
        self._sent_at_ping = 0
        # The client's own.
        self._next_allowed = now
        self._strikes = 0
        self._sent_at_strike = 0

    def look(self, now: float, *, heard: bool, calls: int, sent: int) -> Finding | None:
        """Return whether the client must be pinged, or is dead: its connection ends.

        - ``heard``: whether anything came from the client since the last look.
        - ``sent``: frames that were sent to the client so far, PINGs aside.
        """
        limits = self._limits
        if heard:
            self._seen = now
            self._pinged = None
        if self._pinged is not None:
            late = now - self._pinged >= limits.keepalive_timeout / 1000
            return Finding.END if late and limits.keepalive_timeout else None
        if not limits.keepalive_time or now - self._seen < limits.keepalive_time / 1000:
            return None
        if not calls and not limits.keepalive_permit_without_calls:
            return None
        if sent != self._sent_at_ping:
            self._sent_at_ping = sent
            self._pings = 0
        if self._pings >= limits.http2_max_pings_without_data > 0:
            return None
        self._pings += 1
        self._pinged = now
        return Finding.PING

    def ping_came(self, now: float, *, calls: int, sent: int) -> bool:
        """Return whether a PING of the client's is one too many; parameters as in `look`."""
        limits = self._limits
        early = now < self._next_allowed and sent == self._sent_at_strike
        if sent != self._sent_at_strike:
            self._sent_at_strike = sent
            self._strikes = 0
        interval = limits.http2_min_recv_ping_interval_without_data / 1000
        if not calls and not limits.keepalive_permit_without_calls:
            interval = _IDLE_INTERVAL
        self._next_allowed = now + interval
        self._strikes += early
        return self._strikes > limits.http2_max_ping_strikes > 0


class Watch:
    """The time-outs of one connection."""

    def __init__(self, limits: GrpcConnections, now: float) -> None:
        self.keepalive = Keepalive(limits, now)
        self._start = Waiting(limits.preface_timeout)
        self._idle = Waiting(limits.idle_timeout)
        self._sending = Unsent(limits.send_timeout)
        self._send_timeout = limits.send_timeout
        # How fast the client widens the windows that hold an answer back, by stream.
        self._windows: dict[int, Rate] = {}
        # The newest stream's id, the same object for as long as it is the newest.
        self._highest = 0
        # Spread, so that clients which came at once do not all come again at once.
        spread = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)  # noqa: S311
        self._age = Waiting(limits.max_connection_age / 1000 * spread)
        self._grace = Waiting(limits.max_connection_age_grace / 1000)
        self._leaving = Waiting(_GOODBYE_SECONDS)

    def look(
        self, now: float, http2: Http2Connection, unsent: int, *, leaving: bool, heard: bool
    ) -> Finding | None:
        """Return what is to be done, if anything.

        ``unsent``: bytes that the socket has not taken yet.
        """
        calls = http2.open_streams
        stuck = self._sending.too_slow(now, unsent)
        if self._leaving.too_long(now, True if (leaving or http2.closed) and not calls else None):
            stuck = True
        pulse = self.keepalive.look(now, heard=heard, calls=calls, sent=http2.frames_sent)
        if stuck or pulse is Finding.END or self._grace.too_long(now, True if leaving else None):
            return Finding.END
        if self._start.too_long(now, None if http2.started else True):
            return Finding.UNSTARTED
        old = self._age.too_long(now, True)
        if self._highest != http2.highest_stream:
            self._highest = http2.highest_stream
        idle = self._idle.too_long(now, None if calls else self._highest)
        if (old or idle) and not leaving:
            return Finding.LEAVE
        return pulse

    def unwanted(
        self, now: float, held_back: Sequence[tuple[int, int]], queued: Callable[[int], int]
    ) -> list[int]:
        """Return the streams whose answers the client's windows have held back for too long.

        ``held_back``: those that have more to send than the windows allow, and how many bytes of
        each were let through; none while it is the socket that takes no more.
        """
        if not (held_back or self._windows):
            return []
        known = self._windows
        self._windows = {
            stream_id: known.get(stream_id) or Rate(self._send_timeout)
            for stream_id, _ in held_back
        }
        return [
            stream_id
            for stream_id, nbytes in held_back
            if self._windows[stream_id].too_slow(now, stream_id, nbytes, queued(stream_id))
        ]
