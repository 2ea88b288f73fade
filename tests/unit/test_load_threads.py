"""Threads of loads: how many run at a time."""

import asyncio
import threading
import time

from gpubridge.engine import load_threads
from gpubridge.engine.load_threads import LoadThreads


async def test_a_slot_is_free_again_when_the_event_loop_was_late(monkeypatch):
    monkeypatch.setattr(load_threads, "_PATIENCE_SECONDS", 0.01)
    threads = LoadThreads()
    loop = asyncio.get_running_loop()

    def work():
        # The loop is busy when the result comes, and until the timer of the slot is due.
        loop.call_soon_threadsafe(loop.call_soon, time.sleep, 0.02)

    for _ in range(2 * load_threads._THREADS):
        await asyncio.wait_for(threads.run("a test", work), 10)
    assert threads._slots._value == load_threads._THREADS


async def test_calls_that_hang_give_their_slots_up():
    threads, gate = LoadThreads(), threading.Event()
    hung = [
        asyncio.create_task(threads.run("a hang", gate.wait)) for _ in range(load_threads._THREADS)
    ]
    try:
        assert await asyncio.wait_for(threads.run("a test", lambda: 1), 10) == 1
    finally:
        gate.set()
        await asyncio.gather(*hung)
