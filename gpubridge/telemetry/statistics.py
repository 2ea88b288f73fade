"""Counters of one model version, for the statistics extension and the metrics."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpubridge.dataplane import ModelCounters

_KINDS = ("h2d", "d2h", "d2d", "p2p")
STEPS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
"""Measured steps of a request, in the order of an observation."""

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's upper bounds."""

_WINDOW_NS = 60_000_000_000
_MOST_OBSERVATIONS = 8192
_clock = time.monotonic_ns
_NO_TAGS: Mapping[str, str] = MappingProxyType({})


class DeviceWork:
    """Bytes of ``h2d``, ``d2h``, ``d2d``, ``p2p``, the copies of each, and completion waits."""

    __slots__ = ("_words",)

    def __init__(self, words: Sequence[int] = (0,) * 9) -> None:
        self._words = list(words)

    def add(self, words: Iterable[int]) -> None:
        """Add what was done besides."""
        self._words = [a + b for a, b in zip(self._words, words, strict=True)]

    def plus(self, words: Iterable[int]) -> DeviceWork:
        """Return this with something added to it."""
        work = DeviceWork(self._words)
        work.add(words)
        return work

    def include(self, other: DeviceWork) -> None:
        """Add what another object has."""
        self.add(other._words)

    def copied(self, kind: str, nbytes: int) -> None:
        """Add a copy, and the wait for it."""
        index = _KINDS.index(kind)
        self._words[index] += nbytes
        self._words[index + len(_KINDS)] += 1
        self._words[-1] += 1

    def kinds(self) -> Iterator[tuple[str, int, int]]:
        """Give each kind with its bytes and copies."""
        for index, kind in enumerate(_KINDS):
            yield kind, self._words[index], self._words[index + len(_KINDS)]

    @property
    def waits(self) -> int:
        """Completion waits."""
        return self._words[-1]

    @property
    def any(self) -> bool:
        """Return whether there was any work."""
        return any(self._words)


class LatencyWindow:
    """The requests of the last minute, at most the latest 8192 of them."""

    __slots__ = ("_observations",)

    def __init__(self) -> None:
        self._observations: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_MOST_OBSERVATIONS)

    def observe(self, now: int, durations: tuple[int, ...]) -> None:
        """Take the durations of a request, one for each of ``STEPS``, in nanoseconds."""
        self._observations.append((now, durations))

    def quantiles(self, wanted: Sequence[float], now: int = 0) -> list[list[float]]:
        """Return each quantile of each step in microseconds, NaN without data; ``now`` in ns."""
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
    """Counts durations, ``count`` in all, by upper bounds in milliseconds."""

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


class BatchStatistics(NamedTuple):
    """The executions with batches of one size; nanoseconds are sums over all of them."""

    executions: int
    input_ns: int
    infer_ns: int
    output_ns: int


class ModelStatistics(ModelCounters):
    """Counts for one model version, since it was loaded.

    What stubs answer is counted by `gpubridge.dataplane.ModelCounters`; here is what else the
    metrics tell of a model: ``device_work`` of the server on GPUs for it, ``fallbacks`` to a slower
    way by reason, ``labels``, and how long its first responses take, where that is wanted.
    """

    def __init__(
        self,
        model: str,
        version: int,
        tags: Mapping[str, str] = _NO_TAGS,
        window: LatencyWindow | None = None,
        first_response: LatencyHistogram | None = None,
    ) -> None:
        super().__init__()
        # The underscore is Triton's: a tag cannot be mistaken for a label of its own.
        self.labels = {
            **{f"_{key}": value for key, value in tags.items()},
            "model": model,
            "version": str(version),
        }
        self._window = window
        self.observes = window is not None
        self.first_response = first_response
        self.model = model
        self.version = version
        self.device_work = DeviceWork()
        self.fallbacks: Counter[str] = Counter()

    @property
    def window(self) -> LatencyWindow | None:
        """The durations of its latest requests, where quantiles of them are wanted."""
        if self._window is not None:
            for now, durations in self.take_observations():
                self._window.observe(now, durations)
        return self._window

    @property
    def batches(self) -> dict[int, BatchStatistics]:
        """The executions by batch size."""
        return {size: BatchStatistics(*row) for size, row in self.batch_rows.items()}

    @property
    def last_inference_ms(self) -> int:
        """Wall-clock milliseconds of the last execution's end; 0 before the first."""
        if not self.last_ended_ns:
            return 0
        return (time.time_ns() - time.monotonic_ns() + self.last_ended_ns) // 1_000_000

    @property
    def fail_count(self) -> int:
        """Requests that failed, for whatever reason."""
        return sum(self.failures.values())
