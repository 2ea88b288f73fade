"""PINGs: when a silent client is asked whether it is there, and when its own are too many."""

from __future__ import annotations

import enum

from gpubridge.config import GrpcConnections

__all__ = ["Keepalive", "Pulse"]

_IDLE_INTERVAL = 7200.0
"""Seconds between a client's PINGs while it has no call open, unless those are permitted."""


class Pulse(enum.Enum):
    """What is to be done about a client."""

    NOTHING = enum.auto()
    PING = enum.auto()
    DEAD = enum.auto()


class Keepalive:
    """The PINGs of one connection, both ways; gRPC's rules.

    Parameters
    ----------
    limits : GrpcConnections
        How many, and when.
    now : float
        Seconds, as in all methods.
    """

    __slots__ = (
        "_limits",
        "_next_allowed",
        "_pinged",
        "_pings",
        "_seen",
        "_sent_at_ping",
        "_sent_at_strike",
        "_strikes",
    )

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

    def look(self, now: float, *, heard: bool, calls: int, sent: int) -> Pulse:
        """Return whether the client must be pinged, or is dead.

        Parameters
        ----------
        heard : bool
            Whether anything came from the client since the last look.
        calls : int
            How many are open.
        sent : int
            Frames that were sent to the client so far, PINGs aside.
        """
        limits = self._limits
        if heard:
            self._seen = now
            self._pinged = None
        if self._pinged is not None:
            late = now - self._pinged >= limits.keepalive_timeout / 1000
            return Pulse.DEAD if late and limits.keepalive_timeout else Pulse.NOTHING
        if not limits.keepalive_time or now - self._seen < limits.keepalive_time / 1000:
            return Pulse.NOTHING
        if not calls and not limits.keepalive_permit_without_calls:
            return Pulse.NOTHING
        if sent != self._sent_at_ping:
            self._sent_at_ping = sent
            self._pings = 0
        if self._pings >= limits.http2_max_pings_without_data > 0:
            return Pulse.NOTHING
        self._pings += 1
        self._pinged = now
        return Pulse.PING

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
