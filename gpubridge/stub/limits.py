"""Limits of a stub, shared by its Python runtime and the compiled loop."""

from __future__ import annotations

from typing import NamedTuple


class StubLimits(NamedTuple):
    """Limits that the executor, the sender of results and the compiled loop share.

    - ``gathered_ns``: longest time for which results are gathered before they are sent.
    - ``long_ns``, ``watched_batches``: after a batch longer than ``long_ns``, a second thread watches
      the next ``watched_batches``.
    - ``patience_ns``: the watching thread sends results that have waited this long.
    - ``quiet_looks``: the watching thread sleeps after this many checks without results.
    - ``kept_leases``, ``kept_bytes``: a model that keeps more inputs, or more bytes, gets copies.
    - ``passed_on_bytes``: smallest output that may stay in the memory of its request's input.
    """

    gathered_ns: int = 100_000
    long_ns: int = 1_000_000
    watched_batches: int = 1000
    patience_ns: int = 2_000_000
    quiet_looks: int = 50
    kept_leases: int = 1024
    kept_bytes: int = 64 << 20
    passed_on_bytes: int = 1 << 16


LIMITS = StubLimits()
