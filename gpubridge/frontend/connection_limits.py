"""Limits of the number of connections."""

from __future__ import annotations

import enum
import logging
import resource
import socket
from typing import Any

from gpubridge.dataplane import IdleConnections

_CLOSABLE = 16
"""Idle connections examined in search of one that can be closed."""

_logger = logging.getLogger(__name__)

_FOR_ALL_ELSE = 1024
"""Descriptors for models' processes, segments and files."""
_SHARE = 4
"""Of a limit that is lower than what connections may need, this fraction is for all else."""
_BACKLOG = 1024
"""Connections to an endpoint that the kernel keeps until they are accepted, all in one turn."""
_AMPLE = 1 << 14
"""With fewer descriptors, connections without a limit may well come to need all of them."""
_ALWAYS = 16
"""Each endpoint has room for connections in this fraction of the reserve, whatever is in use."""


class Room(enum.Enum):
    """Say what the process has descriptors for: a connection, its refusal, or neither."""

    FREE = enum.auto()
    SHORT = enum.auto()
    NONE = enum.auto()


def room_for(sock: socket.socket, connections: int) -> Room:
    """Return whether there is room for a new connection to an endpoint that has ``connections``.

    The last descriptors of the process are for its models. The kernel gives out the lowest number that
    is free: if a socket has one of the last, all others are in use.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or connections < _reserve(limit) // _ALWAYS:
        return Room.FREE
    beyond = sock.fileno() - (limit - _reserve(limit))
    if beyond < 0:
        return Room.FREE
    # A refused client may keep its connection for a while.
    return Room.SHORT if beyond < _reserve(limit) // 2 else Room.NONE


def shortage() -> str:
    """Return the text for a client that there is no room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"the server has as many connections open as its limit of {limit} descriptors (ulimit -n) "
        "leaves for clients: try again later"
    )


def _reserve(limit: int) -> int:
    return min(_FOR_ALL_ELSE, limit // _SHARE)


def longest_idle(connections: IdleConnections) -> Any:
    """Return the connection that has been idle longest and has nothing unsent, or None."""
    return next((each for each in connections.first(_CLOSABLE) if not each.unsent), None)


def allow_connections(limits: list[int], regions: int = 0) -> int:
    """Raise the process's limit of descriptors to what its endpoints may need; warn if it is lower.

    - ``limits``: the connection limit of each endpoint; 0 is no limit.
    - ``regions``: regions of shared memory that clients may register.

    Returns the backlog of each endpoint: what is accepted at once must not take the models' descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    unlimited = 0 in limits
    wanted = sum(limits) + regions + _FOR_ALL_ELSE + len(limits) * _BACKLOG
    if unlimited:
        wanted = most
    if soft == resource.RLIM_INFINITY:
        return _BACKLOG
    limit = max(soft, min(wanted, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        _logger.warning(
            "this process may open %d descriptors, fewer than the %d that its connections may need: "
            "raise the limit (ulimit -n), or lower --http-max-connections and "
            "--grpc-max-connections",
            limit,
            wanted,
        )
    elif not unlimited or limit >= _AMPLE:
        return _BACKLOG
    return min(_BACKLOG, _reserve(limit) // (4 * max(1, len(limits))))
