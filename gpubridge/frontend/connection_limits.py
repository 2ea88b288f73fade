"""Limits of the number of connections."""

from __future__ import annotations

import logging
import resource
from typing import Any

from gpubridge.dataplane import IdleConnections

_CLOSABLE = 16
"""Idle connections examined in search of one that can be closed."""

_logger = logging.getLogger(__name__)

_FOR_ALL_ELSE = 1024
"""Descriptors for models' processes, segments and files."""


def longest_idle(connections: IdleConnections) -> Any:
    """Return the connection that has been idle longest and has nothing unsent, or None."""
    return next((each for each in connections.first(_CLOSABLE) if not each.unsent), None)


def allow_connections(limits: list[int], regions: int = 0) -> None:
    """Raise the process's limit of descriptors to what its endpoints may need; warn if it is lower.

    - ``limits``: the connection limit of each endpoint; 0 is no limit.
    - ``regions``: regions of shared memory that clients may register.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    wanted = most if 0 in limits else sum(limits) + regions + _FOR_ALL_ELSE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
    if most < wanted:
        _logger.warning(
            "this process may open %d descriptors, fewer than the %d that its connections may need: "
            "raise the limit (ulimit -n), or lower --http-max-connections and "
            "--grpc-max-connections",
            most,
            wanted,
        )
