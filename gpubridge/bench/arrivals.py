"""Requests at times of their own, whatever the server does: the times, and the latency that counts from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubridge.errors import BridgeError

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
"""The quantiles of latency that are told, by name."""
# A client that sends late adds to the latencies that it measures: a tenth may be its own, or so many µs.
_OWN_SHARE = 0.1
_OWN_US = 50.0


@dataclass(frozen=True, slots=True)
class Followed:
    """Times of a schedule's requests, of CLOCK_MONOTONIC in ns; ``first``: the client ran before all others.

    A request is sendable from the time that was meant on, and when a connection is free.
    """

    meant: NDArray[np.int64]
    sendable: NDArray[np.int64]
    sent: NDArray[np.int64]
    answered: NDArray[np.int64]
    failed: int
    first: bool


def arrivals(rate: float, seconds: float, seed: int) -> NDArray[np.int64]:
    """Return the times of a Poisson process within so many seconds, in ns after the start."""
    numbers = np.random.default_rng(seed)
    count = int(rate * seconds)
    # Given how many there are, the times of a Poisson process are uniform: the rate is met exactly.
    times = np.sort(numbers.random(max(1, count))) * seconds
    return (times * 1e9).astype(np.int64)


def latencies(followed: Followed) -> dict[str, float]:
    """Return quantiles in µs from the time that a request was meant to be sent to its answer."""
    return _quantiles(followed.answered - followed.meant)


def lateness(followed: Followed) -> dict[str, float]:
    """Return quantiles in µs of what the client took from the time that it could send.

    Requests come at random moments, so an answer finds the client as late as a request does.
    """
    return _quantiles(followed.sent - followed.sendable)


def check_client(sample: Mapping[str, float]) -> None:
    """Raise BridgeError where the client itself may be what the latencies show."""
    for name in QUANTILES:
        own, seen = sample[f"late_{name}_us"], sample[f"{name}_us"]
        if own > max(_OWN_US, _OWN_SHARE * seen):
            raise BridgeError(
                f"the client was late: {name} of {own:,.0f} µs, where latencies have {seen:,.0f} "
                f"µs; expected at most {_OWN_US:g} µs or a tenth; is something else running here?"
            )


def _quantiles(times: NDArray[np.int64]) -> dict[str, float]:
    found = np.quantile(times, list(QUANTILES.values())) / 1e3
    return dict(zip(QUANTILES, map(float, found), strict=True))
