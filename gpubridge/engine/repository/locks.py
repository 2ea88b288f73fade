"""Locks for changes of models, with deadlock detection."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from gpubridge.errors import unavailable

ASKED_BY: ContextVar[str | None] = ContextVar("ASKED_BY", default=None)
"""The model whose ``initialize`` waits for the current task, and whose lock is held meanwhile."""


class ModelLocks:
    """A lock for each model, held through a load or unload."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        # By model being loaded: the models that its initialize waits for.
        self._waits: dict[str, Counter[str]] = {}

    @asynccontextmanager
    async def change(self, name: str) -> AsyncIterator[None]:
        """Hold a model's lock.

        Raises BridgeError: UNAVAILABLE for a deadlock: the holder of the lock waits for this task.
        """
        asker = ASKED_BY.get()
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        if asker is None:
            async with lock:
                yield
            return
        if name == asker or self._waits_for(name, asker):
            raise unavailable(
                f"deadlock: the initialize of model '{asker}' waits for a change of "
                f"'{name}', which waits for that initialize; load it from execute, or by a client"
            )
        waits = self._waits.setdefault(asker, Counter())
        waits[name] += 1
        try:
            async with lock:
                yield
        finally:
            waits[name] -= 1
            if not waits[name]:
                del waits[name]
            if not waits and self._waits.get(asker) is waits:
                del self._waits[asker]

    def _waits_for(self, name: str, other: str) -> bool:
        """Return whether the load of a model waits for another load, directly or indirectly."""
        found = {name}
        waiting = [name]
        while waiting:
            for each in self._waits.get(waiting.pop(), ()):
                if each == other:
                    return True
                if each not in found:
                    found.add(each)
                    waiting.append(each)
        return False
