"""The autoscaling policy of a fleet: as many replicas as the waiting requests need.

Requests do not wait while servers are busy, but not too busy: replicas that the work needs stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PENDING, TARGET, BUSY = "pending", "target", "busy"
"""The keys of a replica's report: its waiting requests, their largest desired number, and the share of
the time in which its busiest model executes."""

_MOST_BUSY = 0.8


def pending_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for Ray Serve's ``AutoscalingContext``, and no state."""
    metrics = context.aggregated_metrics or {}
    pending, targets = metrics.get(PENDING, {}), metrics.get(TARGET, {})
    current: int = context.current_num_replicas
    wanted = current
    if pending and targets:
        target = sum(targets.values()) / len(targets)
        wanted = math.ceil(sum(pending.values()) / max(target, 1))
        needed = math.ceil(sum(metrics.get(BUSY, {}).values()) / _MOST_BUSY)
        wanted = max(wanted, min(needed, current))
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}


def pending_target(configs: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many requests should wait at a server at most.

    Twice what its busiest model executes at once: instances × largest batch × 2.
    """
    sizes = (
        instances(config) * max(int(config.get("max_batch_size", 0)), 1)
        for config in configs.values()
    )
    return 2 * max(sizes, default=1)


def instances(config: Mapping[str, Any]) -> int:
    """Return the number of a model's instances."""
    groups = config.get("instance_group", [])
    return sum(int(group.get("count", 1)) for group in groups) or 1
