"""Measures how long clients wait for the first response to a request."""

from __future__ import annotations

import time
from typing import Any

from gpubridge.request import InferRequest, InferResponse
from gpubridge.telemetry.statistics import LatencyHistogram

_clock = time.monotonic_ns


class FirstResponse:
    """Stands between the model and who waits for a request's responses, until the first comes.

    Errors are not counted.
    """

    __slots__ = ("_began", "_histogram", "_on_done", "_on_partial", "_waits")

    def __init__(self, histogram: LatencyHistogram, request: InferRequest) -> None:
        self._histogram = histogram
        self._began = _clock()
        self._waits = True
        self._on_done = request.on_done
        self._on_partial = request.on_partial
        request.on_done = self._finish
        if request.on_partial is not None:
            request.on_partial = self._respond

    def _respond(self, outcome: Any) -> None:
        self._measure(outcome)
        if self._on_partial is not None:
            self._on_partial(outcome)

    def _finish(self, outcome: Any) -> None:
        self._measure(outcome)
        if self._on_done is not None:
            self._on_done(outcome)

    def _measure(self, outcome: Any) -> None:
        if self._waits and isinstance(outcome, InferResponse):
            self._waits = False
            self._histogram.observe(_clock() - self._began)
