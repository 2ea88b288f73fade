"""Whether a client that sends no more still waits for its answers: what the kernel knows of it.

A client that closes its connection and one that only ends its half of it send the same: a FIN. They
differ in what they make of bytes that come after it. The one that is gone resets the connection.
"""

from __future__ import annotations

import asyncio
import enum
import socket

__all__ = ["Presence", "presence"]

_CLOSED = 7
_CLOSE_WAIT = 8
"""The kernel's numbers for the states of a TCP connection."""


class Presence(enum.Enum):
    """What is known of a client."""

    SENDING = enum.auto()
    """It may send further requests."""
    SILENT = enum.auto()
    """It sends no more, even if not all that it has sent was received; it may be gone."""
    GONE = enum.auto()
    """It has reset the connection."""


def presence(transport: asyncio.BaseTransport) -> Presence:
    """Ask the kernel; also where nothing is received for now, so that its end could not be seen."""
    sock = transport.get_extra_info("socket")
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    if state == _CLOSED:
        return Presence.GONE
    return Presence.SILENT if state == _CLOSE_WAIT else Presence.SENDING
