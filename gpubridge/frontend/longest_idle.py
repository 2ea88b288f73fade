"""The choice of the connection that has to go when all are taken and a client wants another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["Idling", "longest_idle"]


class Idling(Protocol):
    """A connection, as far as the choice has to know it."""

    @property
    def idle_since(self) -> float | None:
        """When its client was heard last, if nothing is asked, answered or unsent; else None."""


T = TypeVar("T", bound=Idling)


def longest_idle(connections: Iterable[T]) -> T | None:
    """Return the connection that has been idle for the longest time; None if none is idle."""
    idle = [(since, each) for each in connections if (since := each.idle_since) is not None]
    return min(idle, key=lambda found: found[0])[1] if idle else None
