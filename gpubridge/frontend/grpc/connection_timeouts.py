"""Timeouts of a gRPC connection, checked periodically so that calls need no timers."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence

from gpubridge.config import GrpcConnections
from gpubridge.dataplane import Http2Connection
from gpubridge.frontend.timeouts import Deadline, MinimumRate, SendStall

_IDLE_INTERVAL = 7200.0
"""Minimum seconds between a client's PINGs while it has no open call, unless they are permitted."""

_CLOSE_SECONDS = 5.0
_AGE_SPREAD = 0.1


class TimeoutAction(enum.Enum):
    """Action that a passed timeout requires."""

    #: Close: the client has sent no preface and SETTINGS.
    REFUSE = enum.auto()
    #: Send GOAWAY: the connection has been idle for long, or is old.
    LEAVE = enum.auto()
    #: Abort: the client does not read, does not answer PINGs, or did not leave.
    END = enum.auto()
    #: Close: a header block does not end.
    CALM = enum.auto()
    #: Send a PING.
    PING = enum.auto()


class Keepalive:
    """gRPC's rules for the PINGs of one connection, in both directions.

    ``now``: seconds, as in all methods.
    """

    def __init__(self, limits: GrpcConnections, now: float) -> None:
        self._limits = limits
        # When bytes were last received, and when the pending PING was sent.
        self._seen = now
        self._pinged: float | None = None
        self._pings = 0
        self._sent_at_ping = 0
        # PINGs of the client.
        self._next_allowed = now
        self._strikes = 0
        self._sent_at_strike = 0

    def check(self, now: float, *, heard: bool, calls: int, sent: int) -> TimeoutAction | None:
        """Return PING, END for a client that does not answer, or None.

        - ``heard``: whether bytes were received since the last check.
        - ``sent``: frames sent to the client so far, except PINGs.
        """
        limits = self._limits
        if heard:
            self._seen = now
            self._pinged = None
        if self._pinged is not None:
            late = now - self._pinged >= limits.keepalive_timeout / 1000
            return TimeoutAction.END if late and limits.keepalive_timeout else None
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
        return TimeoutAction.PING

    def ping_received(self, now: float, *, calls: int, sent: int) -> bool:
        """Return whether the client has sent too many PINGs; parameters as in `check`."""
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


class ConnectionTimeouts:
    """The timeouts of one connection."""

    def __init__(self, limits: GrpcConnections, now: float) -> None:
        self.keepalive = Keepalive(limits, now)
        # When bytes were received, at the last check.
        self.heard = 0.0
        self._start = Deadline(limits.preface_timeout)
        self._block = Deadline(limits.message_timeout)
        self._idle = Deadline(limits.idle_timeout)
        self._sending = SendStall(limits.send_timeout)
        self._send_timeout = limits.send_timeout
        # By stream, the rate at which the client's flow control admits a response.
        self._windows: dict[int, MinimumRate] = {}
        # Spread, so that clients which connected together do not all reconnect together.
        spread = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)  # noqa: S311
        self._age = Deadline(limits.max_connection_age / 1000 * spread)
        self._grace = Deadline(limits.max_connection_age_grace / 1000)
        self._closing = Deadline(_CLOSE_SECONDS)
        # Whether the client was sent GOAWAY.
        self._leaving = False

    def check(self, now: float, http2: Http2Connection, unsent: int) -> TimeoutAction | None:
        """Return the action to take, if any.

        ``unsent``: bytes not yet written to the socket.
        """
        calls, leaving = http2.open_streams, self._leaving
        before, self.heard = self.heard, http2.heard
        slow = self._sending.too_slow(now, unsent)
        closing = (leaving or http2.closed) and not calls
        lingers = self._closing.too_long(now, True if closing else None)
        ping = self.keepalive.check(
            now, heard=self.heard != before, calls=calls, sent=http2.frames_sent
        )
        if slow or lingers or ping is TimeoutAction.END:
            return TimeoutAction.END
        if self._grace.too_long(now, True if leaving else None):
            return TimeoutAction.END
        if self._start.too_long(now, None if http2.started else True):
            return TimeoutAction.REFUSE
        if self._block.too_long(now, http2.open_block or None):
            return TimeoutAction.CALM
        old = self._age.too_long(now, True)
        idle = self._idle.too_long(now, None if calls else http2.highest_stream)
        if (old or idle) and not leaving:
            self._leaving = True
            return TimeoutAction.LEAVE
        return ping

    def stalled(
        self, now: float, held_back: Sequence[tuple[int, int]], queued: Callable[[int], int]
    ) -> list[int]:
        """Return the streams whose responses the client's flow control has held back for too long.

        ``held_back``: streams with more to send than their windows allow, and the bytes sent of each;
        none while the socket itself is not writable.
        """
        if not (held_back or self._windows):
            return []
        known = self._windows
        self._windows = {
            stream_id: known.get(stream_id) or MinimumRate(self._send_timeout)
            for stream_id, _ in held_back
        }
        return [
            stream_id
            for stream_id, nbytes in held_back
            if self._windows[stream_id].too_slow(now, stream_id, nbytes, queued(stream_id))
        ]
