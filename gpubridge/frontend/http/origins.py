"""Checks of the web pages, and on loopback of the hosts, by which an endpoint is asked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from gpubridge.config.origins import host_names
from gpubridge.dataplane import HttpOrigins


async def origins_at(address: str, listed: Iterable[str]) -> HttpOrigins:
    """Return the pages, and on a loopback address the hosts, whose requests an endpoint there takes.

    ``listed``: origins of pages, of which each may ask it.
    """
    listed = tuple(listed)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        # The endpoint does not open, and says why.
        found = []
    local = all(ip_address(entry[4][0]).is_loopback for entry in found)
    return HttpOrigins(listed, [address.lower(), *host_names(listed)] if local else None)
