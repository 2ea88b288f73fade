"""Limits of a stub, in both of its runtimes: the compiled loop gets them when it is made."""

from __future__ import annotations

from typing import NamedTuple

from gpubridge.transport.channel import FRAME_LIMIT


class StubLimits(NamedTuple):
    """What the executor, the sender of results and the compiled loop agree on.

    - ``gathered_ns``, ``gathered_bytes``: results are gathered for so long (the work of a few small
      batches), or up to this size.
    - ``long_ns``: a batch that ran longer makes a watch worth its price.
    - ``watched_batches``: the watch goes on for so many batches after such a one: any batch may be
      held up once.
    - ``patience_ns``: after this a result is sent although the batch that follows it still runs.
    - ``quiet_looks``: the watching thread sleeps for good only after so many looks in vain: waking
      it costs more.
    - ``kept_leases``, ``kept_bytes``: a model that keeps more inputs, or more bytes of them, gets
      copies.
    - ``passed_on_bytes``: an output of at least this size may stay in the memory of its request's
      input.
    """

    gathered_ns: int = 100_000
    gathered_bytes: int = FRAME_LIMIT // 2
    long_ns: int = 1_000_000
    watched_batches: int = 1000
    patience_ns: int = 2_000_000
    quiet_looks: int = 50
    kept_leases: int = 1024
    kept_bytes: int = 64 << 20
    passed_on_bytes: int = 1 << 16


LIMITS = StubLimits()
