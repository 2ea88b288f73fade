"""Shared memory that stubs are handed: each model's arena of requests, and who has mapped what."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from gpubridge.host_shm import Budget, Segment
from gpubridge.host_shm.request_arena import RequestArena, reserved_bytes
from gpubridge.transport.leases import read_only_id

if TYPE_CHECKING:
    from gpubridge.engine.devices.region import ClientDeviceSegment

_SERVER = 0


class RegionUser(Protocol):
    """The link to a stub, as far as it has to be known here.

    ``uploads``: whether the stub copies what it is sent through this link to a GPU.
    """

    uploads: bool

    def drop_region(self, region: int) -> None:
        """Have the stub unmap a region."""

    def tell_ahead(self, segment: ClientDeviceSegment) -> None:
        """Tell the stub of a region that it will need, unless it knows it."""

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Have a stub that `uploads` pin a range of a region."""

    def settle_kept(self) -> None:
        """Take back what the stub has let go of since its requests were answered."""


class Regions:
    """Knows which stub has mapped which region, and tells them when one goes; owns the arenas.

    A region's id names its maker in its upper half: the server is 0, others ask for a number.

    ``arena_limit``: bytes of memory for requests, of all models together.
    """

    def __init__(self, arena_limit: int) -> None:
        self.budget = Budget(arena_limit)
        self._arenas: dict[str, RequestArena] = {}
        self._numbers = itertools.count(1)
        self._owners = itertools.count(_SERVER + 1)
        self._living = {_SERVER}
        self._users: dict[int, set[RegionUser]] = {}
        # Arenas' regions, each with those who pin what is in use of it.
        self._pinning: dict[int, tuple[RequestArena, set[RegionUser]]] = {}
        # Revokes regions that clients have shrunk; tells whether one of some ids was among them.
        self.revoke_shrunk: Callable[[Collection[int]], bool] = lambda _: False
        # Closes what is registered, before the driver's contexts go.
        self.close_registered: Callable[[], object] = lambda: None

    def arena(self, model: str) -> RequestArena:
        """Return the arena in which the requests of a model lie, of all its versions.

        A name keeps its arena: what began to come for a model that is loaded anew stays readable.
        """
        arena = self._arenas.get(model)
        if arena is None:
            arena = self._arenas[model] = RequestArena(self.budget, model, self)
        return arena

    def known_arena(self, model: str) -> RequestArena | None:
        """Return the arena of a model; None where nobody has asked for it by `arena`."""
        return self._arenas.get(model)

    def lent(self) -> tuple[int, int]:
        """Return the number of slots that all arenas have lent now, and their bytes."""
        lent = [arena.lent() for arena in self._arenas.values()]
        return sum(slots for slots, _ in lent), sum(nbytes for _, nbytes in lent)

    def trim(self, idle_seconds: float) -> None:
        """Give back the memory of arenas that was not used for ``idle_seconds``."""
        for arena in self._arenas.values():
            arena.trim(idle_seconds)

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

    def pin(self, segment: Segment, user: RegionUser) -> None:
        """Have a stub that `uploads` pin what is in use of a model's memory, and all that will be."""
        region = segment.region
        arena = self._arenas.get(segment.home)
        if arena is None or region >> 32 != _SERVER or not user.uploads:
            return
        self._pinning.setdefault(region, (arena, set()))[1].add(user)
        for offset, nbytes in arena.pin(region):
            user.pin_range(region, offset, nbytes)

    def tell_ahead(self, segment: ClientDeviceSegment, regions: Iterable[int]) -> None:
        """Tell the stubs that know one of some regions of another one."""
        users: set[RegionUser] = set()
        for region in regions:
            users |= self._users.get(region, set())
        for user in users:
            user.tell_ahead(segment)

    def leave(self, user: RegionUser, regions: Iterable[int]) -> None:
        """A stub that knew these regions is gone."""
        for region in regions:
            users = self._users.get(region)
            if users is not None:
                users.discard(user)
                if not users:
                    del self._users[region]
            if region in self._pinning:
                arena, pinning = self._pinning[region]
                pinning.discard(user)
                if not pinning:
                    del self._pinning[region]
                    arena.unpin(region)

    def settle(self, region: int) -> None:
        """Take back what stubs had kept of a region, and are done with."""
        for user in tuple(self._users.get(region, ())):
            user.settle_kept()

    def drop(self, region: int) -> None:
        """A region goes: whoever has mapped it unmaps it, views that exist excepted."""
        self._pinning.pop(region, None)
        for known in (region, read_only_id(region)):
            for user in self._users.pop(known, ()):
                user.drop_region(known)

    def close(self) -> None:
        """Give the arenas back, and all that clients have registered."""
        self.close_registered()
        for arena in self._arenas.values():
            arena.close()

    # -- what arenas ask and tell ----------------------------------------------------------------

    def created(self, arena: RequestArena) -> Segment:
        """Make the segment of an arena."""
        region = _SERVER << 32 | next(self._numbers)
        return Segment.create(region, reserved_bytes(self.budget.limit), arena.home)

    def extended(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Have the stubs pin another range of a segment."""
        for user in tuple(self._pinning[segment.region][1]):
            user.pin_range(segment.region, offset, nbytes)

    def retired(self, segment: Segment) -> None:
        """Have the stubs unmap, and so unpin, what they have no views of.

        Behind the message that is being made, which may name it; a later one maps it anew.
        """
        asyncio.get_running_loop().call_soon(self.drop, segment.region)

    def dropped(self, segment: Segment) -> None:
        """Have the stubs unmap a segment."""
        self.drop(segment.region)
