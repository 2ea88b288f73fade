"""The dynamic batcher: gathers requests into batches of sizes the model prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, cast

from gpubridge.engine.scheduling.item import Item, Place
from gpubridge.engine.scheduling.policy import ItemT, Refusal, stopping_error
from gpubridge.engine.scheduling.queue import PriorityQueue
from gpubridge.engine.scheduling.release_order import ReleaseOrder
from gpubridge.engine.scheduling.settings import DynamicBatching
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["DynamicScheduler"]

_GONE = Place.GONE


class _Forming:
    """The batch at the front of the queue, as far as it was looked at.

    It is kept between calls, so that an item which comes last costs one step and not a walk
    over the whole batch.
    """

    __slots__ = ("_largest", "_max", "_preferred", "_shape", "best", "closed", "count", "known",
                 "oldest", "size")  # fmt: skip

    def __init__(self, preferred: frozenset[int], max_batch_size: int) -> None:
        self._preferred = preferred
        self._max = max_batch_size
        self._largest = max(preferred, default=max_batch_size)
        self._shape: object = None
        self.known = False
        self.clear()

    def clear(self) -> None:
        """Start anew, with an empty batch."""
        self.count = 0
        self.size = 0
        self.best = 0
        self.closed = False
        self.oldest = 0

    @property
    def reached(self) -> bool:
        """Whether no preferred size lies above."""
        return self.closed or self.size >= self._largest

    def offer(self, item: Item) -> None:
        """Look at the next item in the queue's order."""
        if self.closed:
            return
        size = self.size + item.size
        if self.count:
            if size > self._largest and not self.best:
                # No preferred size can be reached any more: what is there already goes.
                self.best = self.count
            if size > self._max or item.shape != self._shape:
                self.closed = True
                return
            if item.arrived < self.oldest:
                self.oldest = item.arrived
        else:
            self._shape = item.shape
            self.oldest = item.arrived
        self.count += 1
        self.size = size
        if size in self._preferred:
            self.best = self.count
        if size >= self._max:
            self.closed = True


class DynamicScheduler(Generic[ItemT]):
    """Batches of requests that came at about the same time, in Triton's rules.

    A batch is due when it has the largest preferred size within reach, when it cannot grow any
    more (the next request does not fit, or has other shapes), or when its oldest request has
    waited ``max_queue_delay``. Then, and only then, it may have any size up to
    ``max_batch_size``.

    Parameters
    ----------
    settings : DynamicBatching
    max_batch_size : int
        0 for a model without batch dimension: every request is a batch.
    """

    def __init__(self, settings: DynamicBatching, max_batch_size: int) -> None:
        self._queue = PriorityQueue(
            settings.default_queue_policy,
            settings.priority_levels,
            settings.default_priority_level,
            settings.priority_queue_policy,
        )
        self._delay_ns = settings.max_queue_delay_us * 1000
        self._forming = _Forming(frozenset(settings.preferred_batch_sizes), max(max_batch_size, 1))
        self._order = ReleaseOrder() if settings.preserve_ordering else None
        self._late: list[Item] = []
        policy = settings.default_queue_policy
        self._may_run_ahead = not (
            settings.priority_levels or policy.max_queue_size or policy.default_timeout_us
        )
        self._stopped = False
        self.wants_answers = settings.preserve_ordering

    @property
    def pending(self) -> int:
        """How many items it holds, those included that `refused` is about to return."""
        return len(self._queue) + len(self._late)

    def add(self, item: ItemT, now_ns: int) -> None:
        """Take an item over.

        Raises
        ------
        BridgeError
            ``UNAVAILABLE``: the queue of its priority is full, or `stop` was called.
        """
        if self._stopped:
            raise stopping_error()
        if self._queue.timed:
            # Who is late by now no longer counts against the queue's limit.
            self._age(now_ns)
        item.arrived = now_ns
        self.enqueue(item, now_ns)

    def enqueue(self, item: ItemT, now_ns: int) -> None:
        """Take over an item whose `arrived` is known: it may have waited elsewhere before."""
        last = self._queue.add(item, now_ns)
        forming = self._forming
        if forming.known:
            if last:
                forming.offer(item)
            else:
                forming.known = False

    def take(self, _instance: int, now_ns: int) -> list[ItemT] | None:
        """Give away the next batch if it is due."""
        if self._queue.timed:
            self._age(now_ns)
        count = self._due(now_ns)
        if not count:
            return None
        pop = self._queue.pop
        items = cast("list[ItemT]", [pop() for _ in range(count)])
        self._forming.known = False
        if self._order is not None:
            self._order.taken(items)
        return items

    def take_ahead(self, instance: int, now_ns: int) -> list[ItemT] | None:
        """Give away the next batch if it cannot grow, and nothing may come before it or has a limit."""
        if not self._may_run_ahead or not self._look().closed:
            return None
        return self.take(instance, now_ns)

    def _due(self, now_ns: int) -> int:
        """Return how many items make the batch to take now; 0 for none."""
        forming = self._look()
        if not forming.count:
            return 0
        waited = now_ns - forming.oldest >= self._delay_ns
        if forming.best and not (waited and self._delay_ns):
            return forming.best
        return forming.count if waited or forming.reached else 0

    def _look(self) -> _Forming:
        forming = self._forming
        if not forming.known:
            forming.clear()
            forming.known = True
            for item in self._queue:
                forming.offer(item)
                if forming.closed:
                    break
        return forming

    def next_wakeup(self, now_ns: int) -> int | None:
        """Return when a batch becomes due, or a request late, by the mere passing of time."""
        if self._late:
            return now_ns
        times = []
        if self._queue.timed:
            deadline = self._queue.next_deadline()
            if deadline:
                times.append(deadline)
        if self._queue and not self._due(now_ns):
            times.append(self._forming.oldest + self._delay_ns)
        return max(min(times), now_ns) if times else None

    def refused(self, now_ns: int) -> list[Refusal[ItemT]]:
        """Give away the items whose time in the queue is over."""
        if self._queue.timed:
            self._age(now_ns)
        late, self._late = self._late, []
        refusals: list[Refusal[ItemT]] = []
        for item in cast("list[ItemT]", late):
            if self._order is not None:
                self._order.dropped(item)
            refusals.append((item, BridgeError("Request timeout expired", ErrorCode.UNAVAILABLE)))
        return refusals

    def _age(self, now_ns: int) -> None:
        if self._queue.age(now_ns, self._late):
            self._forming.known = False

    def cancel(self, item: ItemT) -> bool:
        """Give an item away if it was not taken yet; return whether that was so."""
        if not self._queue.remove(item):
            return False
        self._forming.known = False
        if self._order is not None:
            self._order.dropped(item)
        return True

    def put_back(self, items: Sequence[ItemT]) -> None:
        """Put items that were never started before all others of their priority."""
        self._queue.put_back(items)
        self._forming.known = False

    def answered(self, item: ItemT, _now_ns: int) -> list[ItemT]:
        """Return the items whose outcomes can go out: with ``preserve_ordering`` none or several."""
        item.place = _GONE
        if self._order is None or not self._order.answered(item):
            return [item]
        return self.releasable()

    def releasable(self) -> list[ItemT]:
        """Return what waited for an item that was cancelled or refused."""
        return cast("list[ItemT]", self._order.releasable()) if self._order is not None else []

    def abandon_order(self) -> list[ItemT]:
        """Give up ``preserve_ordering`` for what was taken; return what can go out therefore."""
        return cast("list[ItemT]", self._order.abandon()) if self._order is not None else []

    def instance_up(self, _instance: int) -> None:
        """Nothing: any instance takes any batch."""

    def instance_died(self, _instance: int, _now_ns: int) -> None:
        """Nothing: no request belongs to an instance."""

    def stop(self) -> None:
        """Refuse what comes from now on."""
        self._stopped = True

    def clear(self) -> list[ItemT]:
        """Give everything away."""
        items, self._late = cast("list[ItemT]", self._late), []
        while self._queue:
            items.append(cast("ItemT", self._queue.pop()))
        for item in items:
            item.place = _GONE
            if self._order is not None:
                self._order.dropped(item)
        self._forming.known = False
        return items
