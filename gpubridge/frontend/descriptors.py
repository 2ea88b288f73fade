"""Descriptors for connections: as many as there may be, if the system allows it."""

from __future__ import annotations

import logging
import resource

__all__ = ["allow_connections"]

_logger = logging.getLogger(__name__)

_FOR_ALL_ELSE = 1024
"""Descriptors for models' processes, segments and files."""


def allow_connections(limits: list[int], regions: int = 0) -> None:
    """Raise the process's limit of descriptors to what its doors may need; warn where that fails.

    Parameters
    ----------
    limits : list of int
        How many connections each door may have; 0 is any number.
    regions : int
        How many regions of shared memory clients may register.
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
