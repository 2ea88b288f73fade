"""Shared memory regions: request arenas, stubs' output memory, and which stubs map which region."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from gpubridge.engine.memory.response_store import ResponseStore
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Budget, Segment
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.transport.channel import DescriptorsLost, MalformedMessage
from gpubridge.transport.leases import BorrowedMemory, is_read_only, read_only_id

if TYPE_CHECKING:
    from gpubridge.engine.memory.device_region import ClientDeviceSegment


_SERVER = 0


class RegionUser(Protocol):
    """A channel to a stub through which regions are announced.

    ``uploads``: whether the stub copies tensors received through this channel to a GPU.
    """

    uploads: bool

    def drop_region(self, region: int) -> None:
        """Make the stub unmap a region."""

    def announce_ahead(self, segment: ClientDeviceSegment) -> None:
        """Announce a region that the stub will need, unless it is known."""

    def pin_range(self, region: int, offset: int, nbytes: int) -> None:
        """Make a stub that `uploads` pin a range of a region."""

    def release_kept(self) -> None:
        """Release memory of completed requests that the stub no longer keeps."""


class Regions:
    """Table of regions and the stubs that map them; owns the request arenas.

    The upper half of a region's id is its owner: 0 for the server, a number by `new_owner` for others.

    - ``arena_limit``: bytes of request memory of all models together.
    - ``store_limit``: bytes of all responses that wait for slow readers.
    """

    def __init__(self, arena_limit: int, store_limit: int = 1 << 28) -> None:
        self.budget = Budget(arena_limit)
        self.responses = ResponseStore(store_limit)
        self._arenas: dict[str, RequestArena] = {}
        self._numbers = itertools.count(1)
        self._owners = itertools.count(_SERVER + 1)
        self._living = {_SERVER}
        self._users: dict[int, set[RegionUser]] = {}
        # Regions of arenas, each with the users that pin its used ranges.
        self._pinning: dict[int, tuple[RequestArena, set[RegionUser]]] = {}
        # Revokes regions that clients shrunk; returns whether one of the given ids was among them.
        self.revoke_shrunk: Callable[[Collection[int]], bool] = lambda _: False
        # Closes registered client memory before the GPU contexts are destroyed.
        self.close_registered: Callable[[], object] = lambda: None

    def arena(self, model: str) -> RequestArena:
        """Return the arena for the requests of a model, of all its versions.

        A model that is loaded again keeps its arena, so that requests being received stay valid.
        """
        arena = self._arenas.get(model)
        if arena is None:
            arena = self._arenas[model] = RequestArena(self.budget, model, self)
        return arena

    def known_arena(self, model: str) -> RequestArena | None:
        """Return the arena of a model; None if `arena` was never called for it."""
        return self._arenas.get(model)

    def lent(self) -> tuple[int, int]:
        """Return the number of allocated slots of all arenas, and their bytes."""
        lent = [arena.lent() for arena in self._arenas.values()]
        return sum(slots for slots, _ in lent), sum(nbytes for _, nbytes in lent)

    def trim(self, idle_seconds: float) -> None:
        """Return memory of arenas that was unused for ``idle_seconds`` to the system."""
        for arena in self._arenas.values():
            arena.trim(idle_seconds)

    def new_owner(self) -> int:
        """Return a new owner number."""
        owner = next(self._owners)
        self._living.add(owner)
        return owner

    def retire(self, owner: int, regions: Iterable[int]) -> None:
        """Drop the regions of an owner that is gone."""
        self._living.discard(owner)
        for region in regions:
            self.drop(region)

    def join(self, region: int, user: RegionUser) -> None:
        """Record that a region is announced to a stub in this iteration of the event loop.

        A region of a dead owner may still be passed on, but `drop` was already called for it: make
        the stub unmap it after the message that needs it; the stub keeps what it has views of.
        """
        if region >> 32 not in self._living:
            asyncio.get_running_loop().call_soon(user.drop_region, region)
            return
        self._users.setdefault(region, set()).add(user)

    def pin(self, segment: Segment, user: RegionUser) -> None:
        """Make a stub that `uploads` pin the used ranges of an arena, now and in the future."""
        region = segment.region
        arena = self._arenas.get(segment.home)
        if arena is None or region >> 32 != _SERVER or not user.uploads:
            return
        self._pinning.setdefault(region, (arena, set()))[1].add(user)
        for offset, nbytes in arena.pin(region):
            user.pin_range(region, offset, nbytes)

    def announce_ahead(self, segment: ClientDeviceSegment, regions: Iterable[int]) -> None:
        """Announce a segment to the stubs that know one of ``regions``."""
        users: set[RegionUser] = set()
        for region in regions:
            users |= self._users.get(region, set())
        for user in users:
            user.announce_ahead(segment)

    def leave(self, user: RegionUser, regions: Iterable[int]) -> None:
        """Remove a user from these regions: its stub is dead."""
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

    def release_kept(self, region: int) -> None:
        """Release memory of a region that stubs no longer keep."""
        for user in tuple(self._users.get(region, ())):
            user.release_kept()

    def drop(self, region: int) -> None:
        """Make every stub that maps a region unmap it, except where views exist."""
        self._pinning.pop(region, None)
        for known in (region, read_only_id(region)):
            for user in self._users.pop(known, ()):
                user.drop_region(known)

    def close(self) -> None:
        """Close the arenas and all registered client memory."""
        self.close_registered()
        for arena in self._arenas.values():
            arena.close()

    # -- called by arenas ----------------------------------------------------------------

    def created(self, arena: RequestArena, size: int) -> Segment:
        """Create a segment of an arena."""
        region = _SERVER << 32 | next(self._numbers)
        return Segment.create(region, size, arena.home)

    def extended(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Make the stubs pin another range of a segment."""
        for user in tuple(self._pinning[segment.region][1]):
            user.pin_range(segment.region, offset, nbytes)

    def retired(self, segment: Segment) -> None:
        """Make the stubs unmap a segment, and so unpin it, where they have no views.

        Scheduled after the message being built, which may refer to it; a later message maps it again.
        """
        asyncio.get_running_loop().call_soon(self.drop, segment.region)

    def dropped(self, segment: Segment) -> None:
        """Make the stubs unmap a segment."""
        self.drop(segment.region)


class StubMemory:
    """Maps the output regions that a stub creates, within a limit; owns the mappings.

    - ``owner``: upper half of the ids of the stub's regions.
    - ``limit``: bytes of all regions together.
    - ``table``: the lease bytes by which the server releases slots.

    Attribute ``borrowed``: creates views of the memory.
    """

    def __init__(self, owner: int, limit: int, table: memoryview) -> None:
        self.owner = owner
        self.limit = limit
        self.borrowed = BorrowedMemory(table)
        self._sizes: dict[int, int] = {}

    def announce(self, region: int, size: int, fds: list[int], home: str) -> None:
        """Map a region whose consumer is ``home``; its descriptor is the last of ``fds``.

        Raises MalformedMessage when the id is not the stub's, the limit is exceeded, or the
        descriptor is no sealed memory of that size; DescriptorsLost when the server can map no more.
        """
        total = sum(self._sizes.values()) + size
        own = region >> 32 == self.owner and not is_read_only(region)
        if not own or region in self._sizes or not fds:
            raise MalformedMessage(f"region {region:#x} is not the stub's to announce")
        if total > self.limit:
            raise MalformedMessage(f"{total} bytes of output memory (limit {self.limit})")
        try:
            self.borrowed.announce(region, fds.pop(), size, home)
        except BridgeError as error:
            lost = error.code == ErrorCode.UNAVAILABLE
            kind = DescriptorsLost if lost else MalformedMessage
            raise kind(error.message, error.code) from error
        self._sizes[region] = size

    def drop(self, region: int) -> None:
        """Unmap a region; raises MalformedMessage when it is not the stub's."""
        if self._sizes.pop(region, None) is None:
            raise MalformedMessage(f"region {region:#x} is not the stub's to drop")
        self.borrowed.drop(region)

    def regions(self) -> list[int]:
        """Return the mapped regions."""
        return self.borrowed.regions()

    def close(self) -> None:
        """Unmap every region."""
        self.borrowed.close()
