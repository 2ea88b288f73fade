"""Doors that only clients on this machine reach: there is no network whose load one would have to spare."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["send_unpaced"]

_UNPACED = b"reno"
"""Every kernel has it. BBR, the default of many machines, spreads what is sent over time by timers."""


def send_unpaced(listeners: Iterable[socket.socket]) -> None:
    """Have the kernel send as fast as clients read, where a door listens on loopback."""
    for listener in listeners:
        if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            # Connections inherit it. Not every system lets one choose.
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
