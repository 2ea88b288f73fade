"""Shared memory that any stub can be handed: the arena of requests, and who has mapped what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

from gpubridge.host_shm import HostArena, Segment

__all__ = ["RegionUser", "Regions"]

_SERVER = 0


class RegionUser(Protocol):
    """The link to a stub, as far as it has to be known here."""

    def drop_region(self, region: int) -> None:
        """Have the stub unmap a region."""


class Regions:
    """Knows which stub has mapped which region, and tells them when one goes; owns the arena.

    A region's id names its maker in its upper half: the server is 0, others ask for a number.

    Parameters
    ----------
    arena_limit : int
        Bytes of memory for requests.

    Attributes
    ----------
    arena : HostArena
        Where requests lie.
    """

    def __init__(self, arena_limit: int) -> None:
        self.arena = HostArena(_SERVER, arena_limit, on_drop=self._dropped)
        self._owners = itertools.count(_SERVER + 1)
        self._users: dict[int, set[RegionUser]] = {}

    def new_owner(self) -> int:
        """Give a number that no other maker of regions has or had."""
        return next(self._owners)

    def join(self, region: int, user: RegionUser) -> None:
        """A stub is told of a region."""
        self._users.setdefault(region, set()).add(user)

    def leave(self, user: RegionUser, regions: Iterable[int]) -> None:
        """A stub that knew these regions is gone."""
        for region in regions:
            users = self._users.get(region)
            if users is not None:
                users.discard(user)
                if not users:
                    del self._users[region]

    def drop(self, region: int) -> None:
        """A region goes: whoever has mapped it unmaps it, views that exist excepted."""
        for user in self._users.pop(region, ()):
            user.drop_region(region)

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()

    def _dropped(self, segment: Segment) -> None:
        self.drop(segment.region)
