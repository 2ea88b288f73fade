"""The batch of requests that a thread or task works for: with these the calls that it makes are cancelled."""

from __future__ import annotations

from contextvars import ContextVar

BATCH: ContextVar[int] = ContextVar("gpubridge_batch", default=0)
"""Number of the batch, set before each ``execute``; 0 for none, as in threads that a model starts.

Tasks and `asyncio.to_thread` inherit it. The server ignores the number of a batch whose requests are
all answered.
"""
