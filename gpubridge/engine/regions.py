"""Shared memory that any stub can be handed: the arena of requests, and who has mapped what."""

from __future__ import annotations

import asyncio
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

    def settle_kept(self) -> None:
        """Take back what the stub has let go of since its requests were answered."""


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
        self._living = {_SERVER}
        self._users: dict[int, set[RegionUser]] = {}

    def new_owner(self) -> int:
        """Give a number that no other maker of regions has or had."""
        owner = next(self._owners)
        self._living.add(owner)
        return owner

    def retire(self, owner: int, regions: Iterable[int]) -> None:
        """A maker of regions is gone, and they with it."""
        self._living.discard(owner)
        for region in regions:
            self.drop(region)

    def join(self, region: int, user: RegionUser) -> None:
        """A stub is told of a region, which it is handed in this turn of the event loop.

        What a dead maker has left may still be handed on. Nobody would ever drop it: the stub unmaps
        it again behind the message that needs it, and keeps what it has views of.
        """
        if region >> 32 not in self._living:
            asyncio.get_running_loop().call_soon(user.drop_region, region)
            return
        self._users.setdefault(region, set()).add(user)

    def leave(self, user: RegionUser, regions: Iterable[int]) -> None:
        """A stub that knew these regions is gone."""
        for region in regions:
            users = self._users.get(region)
            if users is not None:
                users.discard(user)
                if not users:
                    del self._users[region]

    def settle(self, region: int) -> None:
        """Take back what stubs had kept of a region, and are done with."""
        for user in tuple(self._users.get(region, ())):
            user.settle_kept()

    def drop(self, region: int) -> None:
        """A region goes: whoever has mapped it unmaps it, views that exist excepted."""
        for user in self._users.pop(region, ()):
            user.drop_region(region)

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()

    def _dropped(self, segment: Segment) -> None:
        self.drop(segment.region)
