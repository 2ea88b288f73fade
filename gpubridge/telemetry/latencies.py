"""How durations are distributed: quantiles over the last minute, and histograms."""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Sequence

__all__ = ["FIRST_RESPONSE_BUCKETS_MS", "STEPS", "LatencyHistogram", "LatencyWindow"]

STEPS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
"""What is measured of a request, in the order of an observation."""

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's upper bounds."""

_WINDOW_NS = 60_000_000_000
_MOST_OBSERVATIONS = 8192

_clock = time.monotonic_ns


class LatencyWindow:
    """The requests of the last minute, at most the latest 8192 of them."""

    __slots__ = ("_observations",)

    def __init__(self) -> None:
        self._observations: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_MOST_OBSERVATIONS)

    def observe(self, now: int, durations: tuple[int, ...]) -> None:
        """Take the durations of a request, one for each of ``STEPS``, in nanoseconds."""
        self._observations.append((now, durations))

    def quantiles(self, wanted: Sequence[float], now: int = 0) -> list[list[float]]:
        """Return each quantile of each step, in microseconds; NaN where nothing was observed.

        ``now`` is CLOCK_MONOTONIC nanoseconds, 0 for the present.
        """
        since = (now or _clock()) - _WINDOW_NS
        observations = self._observations
        while observations and observations[0][0] < since:
            observations.popleft()
        if not observations:
            return [[math.nan] * len(wanted) for _ in STEPS]
        found = []
        for column in zip(*(durations for _, durations in observations), strict=True):
            values = sorted(column)
            ranks = [max(0, math.ceil(q * len(values)) - 1) for q in wanted]
            found.append([values[rank] // 1000 for rank in ranks])
        return found


class LatencyHistogram:
    """Counts durations by upper bounds in milliseconds.

    Attributes
    ----------
    sum_ms : float
    count : int
        Of all observations.
    """

    __slots__ = ("_bounds", "_counts", "count", "sum_ms")

    def __init__(self, bounds_ms: Sequence[float]) -> None:
        self._bounds = tuple(bounds_ms)
        self._counts = [0] * len(self._bounds)
        self.sum_ms = 0.0
        self.count = 0

    def observe(self, nanoseconds: int) -> None:
        """Count a duration."""
        milliseconds = nanoseconds / 1e6
        self.sum_ms += milliseconds
        self.count += 1
        bucket = bisect.bisect_left(self._bounds, milliseconds)
        if bucket < len(self._counts):
            self._counts[bucket] += 1

    def buckets(self) -> list[tuple[float, int]]:
        """Return each upper bound with the number of observations up to it; the last is infinite."""
        total = 0
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            found.append((bound, total))
        return [*found, (math.inf, self.count)]
