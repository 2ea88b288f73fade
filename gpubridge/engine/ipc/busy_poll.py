"""Busy polling: keeps the event loop awake for a moment between short messages."""

from __future__ import annotations

from asyncio import AbstractEventLoop

from gpubridge.dataplane import BusyPoll


def busy_poll(loop: AbstractEventLoop, awake_ns: int) -> BusyPoll:
    """Return what keeps a loop awake for one stub and its clients, ``awake_ns`` at most."""
    return BusyPoll(loop.call_soon, descriptor_of_events(loop), awake_ns)


def descriptor_of_events(loop: AbstractEventLoop) -> int:
    """Return a descriptor that is readable when the loop has events; -1 if unknown."""
    # uvloop has one; polling it costs a third of an iteration.
    backend = getattr(loop, "_get_backend_id", None)
    return -1 if backend is None else int(backend())
