"""Statistics of a model version, for the statistics extension and the metrics."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

from gpubridge.dataplane import CallCounts, ModelCounters
from gpubridge.errors import BridgeError, ErrorCode

_KINDS = ("h2d", "d2h", "d2d", "p2p")
STEPS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
"""Measured steps of a request, in the order of observations."""

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's default upper bounds."""

_FAULTS = (ErrorCode.INTERNAL, ErrorCode.UNKNOWN)
"""Other codes of a model are the request's fault, or say that it is busy."""
_ERRORS = 5
_ERROR_TEXT = 4000
_IDENTIFIER = 128
_WINDOW_NS = 60_000_000_000
_MOST_OBSERVATIONS = 8192
_clock = time.monotonic_ns
_NO_TAGS: Mapping[str, str] = MappingProxyType({})


class DeviceWork:
    """Copied bytes and copies by kind (``h2d``, ``d2h``, ``d2d``, ``p2p``), and completion waits."""

    __slots__ = ("_words",)

    def __init__(self, words: Sequence[int] = (0,) * 9) -> None:
        self._words = list(words)

    def add(self, words: Iterable[int]) -> None:
        """Add counts."""
        self._words = [a + b for a, b in zip(self._words, words, strict=True)]

    def plus(self, words: Iterable[int]) -> DeviceWork:
        """Return a copy with added counts."""
        work = DeviceWork(self._words)
        work.add(words)
        return work

    def include(self, other: DeviceWork) -> None:
        """Add the counts of another object."""
        self.add(other._words)

    def copied(self, kind: str, nbytes: int) -> None:
        """Count a copy and the wait for it."""
        index = _KINDS.index(kind)
        self._words[index] += nbytes
        self._words[index + len(_KINDS)] += 1
        self._words[-1] += 1

    def kinds(self) -> Iterator[tuple[str, int, int]]:
        """Yield each kind with its bytes and copies."""
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
        """Add the durations of a request in nanoseconds, of ``STEPS`` or the first of them."""
        self._observations.append((now, durations))

    def quantiles(self, wanted: Sequence[float], now: int = 0) -> list[list[float]]:
        """Return each quantile of each step in microseconds, NaN without data; ``now`` in ns."""
        since = (now or _clock()) - _WINDOW_NS
        observations = self._observations
        while observations and observations[0][0] < since:
            observations.popleft()
        found = []
        for step in range(len(STEPS)):
            values = sorted(each[step] for _, each in observations if step < len(each))
            ranks = [max(0, math.ceil(q * len(values)) - 1) for q in wanted]
            found.append([values[rank] // 1000 if values else math.nan for rank in ranks])
        return found


class LatencyHistogram:
    """Histogram of durations by upper bounds in milliseconds."""

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
        """Return each upper bound with the count of durations up to it; the last is infinite."""
        total = 0
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            found.append((bound, total))
        return [*found, (math.inf, self.count)]


class RequestError(NamedTuple):
    """Failed requests with the same error.

    - ``text``: the begin of the error, with the model's traceback where it raised one.
    - ``requests``: how many, since the error was first among the latest.
    - ``last``: when the latest of them failed, in seconds of CLOCK_MONOTONIC.
    - ``identifier``: its id.
    """

    text: str
    requests: int
    last: float
    identifier: str


class RecentErrors:
    """The latest different errors of a model's requests."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[str, RequestError] = {}

    def add(self, error: BridgeError, identifier: str) -> None:
        """Count a failed request."""
        text = error.opening(_ERROR_TEXT)
        before = self._rows.pop(text, None)
        count = 1 if before is None else before.requests + 1
        self._rows[text] = RequestError(text, count, time.monotonic(), identifier[:_IDENTIFIER])
        if len(self._rows) > _ERRORS:
            del self._rows[next(iter(self._rows))]

    def rows(self) -> list[RequestError]:
        """Return the errors, the latest first."""
        return list(reversed(self._rows.values()))


class BatchStatistics(NamedTuple):
    """Executions of one batch size, with total nanoseconds."""

    executions: int
    input_ns: int
    infer_ns: int
    output_ns: int


class ModelStatistics(ModelCounters):
    """Statistics of one model version since it was loaded.

    `gpubridge.dataplane.ModelCounters` counts requests and executions; this class adds the server's
    ``device_work`` for the model, slower ``fallbacks`` by reason, ``calls`` by the called model and its version, the latest ``errors``, ``labels``,
    histograms, and whether the response cache is used (``caches``). ``since``: the Unix time from which on it
    counts.
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
        # As in Triton, tags get an underscore so that they do not collide with its labels.
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
        self.errors = RecentErrors()
        self.calls: dict[tuple[str, int], CallCounts] = {}
        self.since = time.time_ns() / 1e9
        self.caches = False

    def calls_to(self, model: str, version: int) -> CallCounts:
        """Return the counts of the calls to a version of another model."""
        return self.calls.setdefault((model, version), CallCounts())

    @property
    def window(self) -> LatencyWindow | None:
        """The durations of the latest requests, if quantiles are enabled."""
        if self._window is not None:
            for now, durations in self.take_observations():
                self._window.observe(now, durations)
        return self._window

    def cache_hit(self, spent_ns: int) -> None:
        """Count a request that the response cache answered, which has neither queue nor execution."""
        super().cache_hit(spent_ns)
        window = self.window
        if window is not None:
            window.observe(_clock(), (spent_ns, 0))

    @contextmanager
    def refusing(self, identifier: str) -> Iterator[None]:
        """Count a request that is refused before the model has it, by a BridgeError of the block."""
        try:
            yield
        except BridgeError as error:
            self.refused(error, identifier)
            raise

    def refused(self, error: BridgeError, identifier: str = "") -> None:
        """Count a request that is refused before the model has it."""
        self.failed("OTHER", 0)
        self._note(error, identifier)

    def note_error(self, error: BridgeError, identifier: str) -> None:
        """Note the error of a request that the model had; it tells from then on whose it is."""
        error.fault = error.fault or error.code in _FAULTS
        self._note(error, identifier)

    def _note(self, error: BridgeError, identifier: str) -> None:
        self.errors.add(error, identifier)
        error.whose = self, identifier

    @property
    def executed_count(self) -> int:
        """Number of requests that succeeded and were executed."""
        return self.success_count - self.cache_hits

    @property
    def batches(self) -> dict[int, BatchStatistics]:
        """Executions by batch size."""
        return {size: BatchStatistics(*row) for size, row in self.batch_rows.items()}

    @property
    def last_inference_ms(self) -> int:
        """Wall-clock milliseconds of the last execution's end; 0 before the first."""
        if not self.last_ended_ns:
            return 0
        return (time.time_ns() - time.monotonic_ns() + self.last_ended_ns) // 1_000_000

    @property
    def fail_count(self) -> int:
        """Number of failed requests."""
        return sum(self.failures.values())
