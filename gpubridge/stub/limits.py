"""Limits of a stub, in both of its runtimes: the compiled loop gets them when it is made."""

from __future__ import annotations

from typing import NamedTuple


class StubLimits(NamedTuple):
    """Limits that the executor, the sender of results and the compiled loop share.

    - ``gathered_ns``: so long results are gathered.
    - ``long_ns``, ``watched_batches``: after a batch that ran longer so many are watched.
    - ``patience_ns``: after this a result is sent although the batch that follows it still runs.
    - ``quiet_looks``: after so many in vain the watching thread sleeps: waking it costs more.
    - ``kept_leases``, ``kept_bytes``: a model that keeps more inputs, or bytes of them, gets
      copies.
    - ``passed_on_bytes``: an output of at least this size may stay in its request's input.
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
