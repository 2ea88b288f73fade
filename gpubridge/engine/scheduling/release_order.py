"""The order in which outcomes leave, where a model's clients rely on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpubridge.engine.scheduling.item import Item

__all__ = ["ReleaseOrder"]


class ReleaseOrder:
    """Holds back what is answered early until everything taken before it is answered too.

    An item keeps its place in the order when it is put back and taken again.
    """

    def __init__(self) -> None:
        self._order: deque[Item] = deque()
        self._members: set[Item] = set()
        self._settled: set[Item] = set()
        self._silent: set[Item] = set()

    def taken(self, items: Sequence[Item]) -> None:
        """Append items to the order."""
        for item in items:
            if item not in self._members:
                self._members.add(item)
                self._order.append(item)

    def answered(self, item: Item) -> bool:
        """Note that an item's outcome is there; return False for an item that is not in order."""
        known = item in self._members
        if known:
            self._settled.add(item)
        return known

    def dropped(self, item: Item) -> None:
        """Note that nobody waits for an item's outcome here; others wait no longer for it."""
        if item in self._members:
            self._settled.add(item)
            self._silent.add(item)

    def releasable(self) -> list[Item]:
        """Take out the items that have an outcome and nothing before them."""
        items: list[Item] = []
        order = self._order
        while order and order[0] in self._settled:
            item = order.popleft()
            self._settled.remove(item)
            self._members.remove(item)
            if item in self._silent:
                self._silent.remove(item)
            else:
                items.append(item)
        return items

    def abandon(self) -> list[Item]:
        """Forget the order; return the items that were held back."""
        held = [i for i in self._order if i in self._settled and i not in self._silent]
        self._order.clear()
        for group in (self._members, self._settled, self._silent):
            group.clear()
        return held
