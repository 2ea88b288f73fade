"""The queue before a batch: levels of priority, each with limits on number and time."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from gpubridge.engine.scheduling.item import Item, Place, request_prefix
from gpubridge.engine.scheduling.settings import QueuePolicy, TimeoutAction
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["PriorityQueue"]

_QUEUED = Place.QUEUED
_DELAYED = Place.DELAYED
_TAKEN = Place.TAKEN
_GONE = Place.GONE

_SLACK = 64
"""Entries of items that are gone which a queue may carry before it is swept."""


class _Level:
    """The items of one priority.

    What leaves from the middle stays in the deques and in the heap, with another `place`, and is
    passed over later: removal costs nothing, and sweeping is paid for by what was added.
    """

    __slots__ = ("_deadlines", "_delayed", "_policy", "_serial", "_waiting", "delayed", "live")

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._waiting: deque[Item] = deque()
        self._delayed: deque[Item] = deque()
        self._deadlines: list[tuple[int, int, Item]] = []
        self._serial = 0
        self.live = 0
        self.delayed = 0

    def add(self, item: Item, now_ns: int) -> None:
        policy = self._policy
        if policy.max_queue_size and self.live >= policy.max_queue_size:
            raise BridgeError(
                f"{request_prefix(item)}Exceeds maximum queue size", ErrorCode.UNAVAILABLE
            )
        timeout_us = policy.default_timeout_us
        if timeout_us:
            if policy.allow_timeout_override and 0 < item.timeout_us < timeout_us:
                timeout_us = item.timeout_us
            item.deadline = now_ns + timeout_us * 1000
            self._serial += 1
            heapq.heappush(self._deadlines, (item.deadline, self._serial, item))
        item.place = _QUEUED
        self._waiting.append(item)
        self.live += 1
        if len(self._waiting) + len(self._deadlines) > 4 * self.live + _SLACK:
            self._sweep()

    def put_back(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            # It had its turn: time in the queue no longer counts against it.
            item.deadline = 0
            item.place = _QUEUED
            self._waiting.appendleft(item)
        self.live += len(items)

    def pop(self) -> Item:
        """Take the first one out; there is one."""
        waiting = self._waiting
        while waiting:
            item = waiting.popleft()
            if item.place is _QUEUED:
                break
        else:
            while True:
                item = self._delayed.popleft()
                if item.place is _DELAYED:
                    break
            self.delayed -= 1
        item.place = _TAKEN
        self._left()
        return item

    def remove(self, item: Item) -> None:
        if item.place is _DELAYED:
            self.delayed -= 1
        item.place = _GONE
        self._left()

    def _left(self) -> None:
        self.live -= 1
        if not self.live:
            self._waiting.clear()
            self._delayed.clear()
            self._deadlines.clear()

    def __iter__(self) -> Iterator[Item]:
        for item in self._waiting:
            if item.place is _QUEUED:
                yield item
        for item in self._delayed:
            if item.place is _DELAYED:
                yield item

    def next_deadline(self) -> int:
        """Return when the first one is late, in ns; 0 for never."""
        deadlines = self._deadlines
        while deadlines:
            deadline, _, item = deadlines[0]
            if item.place is _QUEUED and item.deadline == deadline:
                return deadline
            heapq.heappop(deadlines)
        return 0

    def age(self, now_ns: int, late: list[Item]) -> bool:
        """Take out or put behind what is late; return whether the order changed."""
        changed = False
        while 0 < self.next_deadline() <= now_ns:
            item = heapq.heappop(self._deadlines)[2]
            changed = True
            if self._policy.timeout_action is TimeoutAction.REJECT:
                self.remove(item)
                late.append(item)
            else:
                item.place = _DELAYED
                self._delayed.append(item)
                self.delayed += 1
        return changed

    def _sweep(self) -> None:
        self._waiting = deque(item for item in self._waiting if item.place is _QUEUED)
        self._delayed = deque(item for item in self._delayed if item.place is _DELAYED)
        self._deadlines = [
            entry
            for entry in self._deadlines
            if entry[2].place is _QUEUED and entry[2].deadline == entry[0]
        ]
        heapq.heapify(self._deadlines)


class PriorityQueue:
    """Items in the order in which they are to be executed.

    A level is served only while those above it are empty; within a level items that passed their
    time, where its policy is DELAY, come after all others.

    Parameters
    ----------
    policy : QueuePolicy
        For every level without its own.
    levels : int
        Priorities are 1 to `levels`; 0 for a queue without priorities.
    default_level : int
        Where items go that name no priority, or none that exists.
    policies : mapping of int to QueuePolicy
        The levels with a policy of their own.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        levels: int = 0,
        default_level: int = 0,
        policies: Mapping[int, QueuePolicy] | None = None,
    ) -> None:
        self._policy = policy
        self._count = levels
        self._default_level = default_level if levels else 0
        self._policies = dict(policies or {}) if levels else {}
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._only = None if levels else self._level(0)
        self.timed = any(entry.default_timeout_us for entry in (policy, *self._policies.values()))

    def __len__(self) -> int:
        if self._only is not None:
            return self._only.live
        return sum(level.live for level in self._levels.values())

    def __bool__(self) -> bool:
        if self._only is not None:
            return self._only.live > 0
        return any(level.live for level in self._levels.values())

    def __iter__(self) -> Iterator[Item]:
        """Go through the items in the order in which `pop` gives them."""
        for number in self._order:
            yield from self._levels[number]

    def add(self, item: Item, now_ns: int) -> bool:
        """Take an item in; return whether it is the last in the order.

        Raises
        ------
        BridgeError
            ``UNAVAILABLE``: its level holds `max_queue_size` items already.
        """
        only = self._only
        if only is not None:
            only.add(item, now_ns)
            return not only.delayed
        number = self._number(item)
        level = self._level(number)
        level.add(item, now_ns)
        return not level.delayed and not any(
            self._levels[other].live for other in reversed(self._order) if other > number
        )

    def pop(self) -> Item | None:
        """Take the first item out; None when there is none."""
        only = self._only
        if only is not None:
            return only.pop() if only.live else None
        for number in self._order:
            level = self._levels[number]
            if level.live:
                return level.pop()
        return None

    def put_back(self, items: Sequence[Item]) -> None:
        """Put items back before all others of their levels; they are never late again."""
        by_level: dict[int, list[Item]] = {}
        for item in items:
            by_level.setdefault(self._number(item), []).append(item)
        for number, group in by_level.items():
            self._level(number).put_back(group)

    def remove(self, item: Item) -> bool:
        """Take one item out, wherever it is; return whether it was here."""
        if item.place is not _QUEUED and item.place is not _DELAYED:
            return False
        self._levels[self._number(item)].remove(item)
        return True

    def age(self, now_ns: int, late: list[Item]) -> bool:
        """Append to `late` what is given up at ``now_ns``; return whether the order changed."""
        changed = False
        for level in self._levels.values():
            changed |= level.age(now_ns, late)
        return changed

    def next_deadline(self) -> int:
        """Return when `age` has something to do, in ns; 0 for never."""
        deadlines = [level.next_deadline() for level in self._levels.values()]
        return min(filter(None, deadlines), default=0)

    def _number(self, item: Item) -> int:
        return item.priority if 1 <= item.priority <= self._count else self._default_level

    def _level(self, number: int) -> _Level:
        level = self._levels.get(number)
        if level is None:
            if len(self._levels) > _SLACK:
                self._drop_empty()
            level = self._levels[number] = _Level(self._policies.get(number, self._policy))
            insort(self._order, number)
        return level

    def _drop_empty(self) -> None:
        """Forget empty levels: clients choose the numbers, and there may be 2**64 of them."""
        self._levels = {number: level for number, level in self._levels.items() if level.live}
        self._order = sorted(self._levels)
