"""A day of autoscaling by waiting requests, second by second."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpubridge.ray.autoscaling import BUSY, PENDING, TARGET, pending_policy

DAY = 86_400


@dataclass(frozen=True)
class DayPlan:
    """A fleet's load over a day, and how fast it scales.

    - ``peak``: requests a second at noon; at night there are ``night`` times as many.
    - ``capacity``: requests a second of a server; ``target``: waiting requests of a server.
    """

    peak: float
    capacity: float
    least: int
    most: int
    night: float = 0.2
    target: float = 32.0
    start_seconds: int = 60
    upscale_seconds: int = 10
    downscale_seconds: int = 300


@dataclass
class Day:
    """By minute: the load, the servers that are ready, the longest wait in seconds."""

    load: list[float] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)

    @property
    def server_hours(self) -> float:
        """Return the hours of all servers together."""
        return sum(self.servers) / 60


class _Context:
    """What the policy reads of Ray Serve's ``AutoscalingContext``."""

    def __init__(self, plan: DayPlan, ready: int, waiting: float, use: float) -> None:
        self.current_num_replicas = ready
        self.capacity_adjusted_min_replicas = plan.least
        self.capacity_adjusted_max_replicas = plan.most
        self.aggregated_metrics = {
            PENDING: {"all": waiting},
            TARGET: {"each": plan.target},
            BUSY: {"all": use * ready},
        }


def load_at(plan: DayPlan, second: int) -> float:
    """Return the requests a second: few at night, most at noon."""
    wave = (1 - math.cos(2 * math.pi * second / DAY)) / 2
    return plan.peak * (plan.night + (1 - plan.night) * wave**2)


def run_day(plan: DayPlan) -> Day:
    """Return what the fleet does over a day."""
    day = Day()
    ready, waiting = math.ceil(load_at(plan, 0) / plan.capacity / 0.8), 0.0
    starting: list[int] = []
    above = below = 0
    longest = 0.0
    for second in range(DAY):
        ready += sum(at == second for at in starting)
        starting = [at for at in starting if at > second]
        load, capacity = load_at(plan, second), ready * plan.capacity
        waiting = max(0.0, waiting + load - capacity)
        # Below its capacity a server has a queue, too: that of M/M/1.
        use = min(load / capacity, 0.99)
        queued = waiting + ready * use * use / (1 - use)
        wanted, _ = pending_policy(_Context(plan, ready, queued, min(load / capacity, 1.0)))
        above = above + 1 if wanted > ready + len(starting) else 0
        below = below + 1 if wanted < ready else 0
        if above >= plan.upscale_seconds:
            starting += [second + plan.start_seconds] * (wanted - ready - len(starting))
            above = 0
        if below >= plan.downscale_seconds and not starting:
            ready, below = wanted, 0
        longest = max(longest, queued / capacity)
        if second % 60 == 59:
            day.load.append(load)
            day.servers.append(ready)
            day.wait.append(longest)
            longest = 0.0
    return day
