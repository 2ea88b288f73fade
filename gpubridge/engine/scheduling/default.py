"""The scheduler of a model that asks for none: every request is a batch, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpubridge.engine.scheduling.item import Item, Place
from gpubridge.engine.scheduling.policy import Refusal, stopping_error

__all__ = ["DefaultScheduler"]

_QUEUED = Place.QUEUED
_TAKEN = Place.TAKEN
_GONE = Place.GONE

_SLACK = 64


class DefaultScheduler:
    """One request after the other; priorities and time-outs have no effect, as in Triton."""

    wants_answers = False

    def __init__(self) -> None:
        self._queue: deque[Item] = deque()
        self._cancelled = 0
        self._stopped = False

    @property
    def pending(self) -> int:
        """How many items it holds."""
        return len(self._queue) - self._cancelled

    def add(self, item: Item, now_ns: int) -> None:
        """Take an item over; refuse it (``UNAVAILABLE``) after `stop`."""
        if self._stopped:
            raise stopping_error()
        item.arrived = now_ns
        item.place = _QUEUED
        self._queue.append(item)

    def take(self, _instance: int, _now_ns: int) -> list[Item] | None:
        """Give away the first item."""
        queue = self._queue
        while queue:
            item = queue.popleft()
            if item.place is _QUEUED:
                item.place = _TAKEN
                return [item]
            self._cancelled -= 1
        return None

    def take_ahead(self, instance: int, now_ns: int) -> list[Item] | None:
        """Give away the first item: it is a batch by itself."""
        return self.take(instance, now_ns)

    def next_wakeup(self, _now_ns: int) -> int | None:
        """Return None: nothing here depends on time."""
        return None

    def refused(self, _now_ns: int) -> list[Refusal[Item]]:
        """Return nothing: whatever was taken over is executed."""
        return []

    def cancel(self, item: Item) -> bool:
        """Give an item away if it was not taken yet; return whether that was so."""
        if item.place is not _QUEUED:
            return False
        item.place = _GONE
        self._cancelled += 1
        if self._cancelled > len(self._queue) // 2 + _SLACK:
            self._queue = deque(entry for entry in self._queue if entry.place is _QUEUED)
            self._cancelled = 0
        return True

    def put_back(self, items: Sequence[Item]) -> None:
        """Put items that were never started before all others, in the order given."""
        for item in items:
            item.place = _QUEUED
        self._queue.extendleft(reversed(items))

    def answered(self, item: Item, _now_ns: int) -> list[Item]:
        """Return the item: its outcome can go out."""
        item.place = _GONE
        return [item]

    def releasable(self) -> list[Item]:
        """Return nothing: no outcome waits for another."""
        return []

    def instance_up(self, _instance: int) -> None:
        """Nothing: any instance takes any request."""

    def instance_died(self, _instance: int, _now_ns: int) -> None:
        """Nothing: no request belongs to an instance."""

    def stop(self) -> None:
        """Refuse what comes from now on."""
        self._stopped = True

    def clear(self) -> list[Item]:
        """Give everything away."""
        items = [item for item in self._queue if item.place is _QUEUED]
        for item in items:
            item.place = _GONE
        self._queue.clear()
        self._cancelled = 0
        return items
