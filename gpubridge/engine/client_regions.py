"""The shared memory that clients have registered: names, rules, and who is using it now."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpubridge.engine.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import ClientSegment

__all__ = ["ClientPlace", "ClientRegion", "ClientRegions", "RegionUse"]

_SWITCHED_OFF = (
    "system shared memory is off on this server: start it with --allow-client-shm=true if its clients "
    "may have their memory mapped, or send the tensors"
)


class ClientRegion:
    """One registration.

    Attributes
    ----------
    name, key : str
        The client's name for it; that of the object in /dev/shm.
    offset, nbytes : int
        Where in the object it begins; its bytes.
    segment : ClientSegment
        The opened object.
    uses : int
        Requests in flight that it is used by.
    """

    __slots__ = ("key", "name", "nbytes", "offset", "segment", "uses")

    def __init__(
        self, name: str, key: str, offset: int, nbytes: int, segment: ClientSegment
    ) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self.segment = segment
        self.uses = 0


class ClientPlace(NamedTuple):
    """Some bytes of a registered region; ``offset`` is that in the object."""

    region: ClientRegion
    offset: int
    nbytes: int


class RegionUse:
    """The use of regions by one request: they cannot be unregistered while this object lives.

    Parameters
    ----------
    places : iterable of ClientPlace
        Inputs and outputs.
    outputs : sequence of str
        The outputs that the stub writes to such places.
    """

    __slots__ = ("_regions", "outputs")

    def __init__(self, places: Iterable[ClientPlace], outputs: Sequence[str]) -> None:
        self._regions = {place.region for place in places}
        self.outputs = frozenset(outputs)
        for region in self._regions:
            region.uses += 1

    @property
    def segments(self) -> list[ClientSegment]:
        """What the stub has to have mapped."""
        return [region.segment for region in self._regions]

    def __del__(self) -> None:
        for region in self._regions:
            region.uses -= 1


class ClientRegions:
    """Registers clients' POSIX shared memory; owns what it has opened.

    The rules and texts are Triton's, except that one object may be registered under several names,
    and that an offset need not be that of a page.

    Parameters
    ----------
    regions : Regions
        Told when stubs have to unmap something.
    allowed : bool
        Whether clients may register memory at all.
    most : int
        How many regions there may be at once; each costs a descriptor here.
    """

    def __init__(self, regions: Regions, *, allowed: bool, most: int) -> None:
        self._all = regions
        self._allowed = allowed
        self._most = most
        self._owner = regions.new_owner()
        self._numbers = itertools.count(1)
        self._registered: dict[str, ClientRegion] = {}

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open an object under a name.

        Raises
        ------
        BridgeError
            UNSUPPORTED when that is switched off, ALREADY_EXISTS for a name in use, UNAVAILABLE when
            there are too many, INTERNAL when the object cannot be opened or is too small.
        """
        if not self._allowed:
            raise BridgeError(f"cannot register '{name}': {_SWITCHED_OFF}", ErrorCode.UNSUPPORTED)
        if name in self._registered:
            raise BridgeError(
                f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS
            )
        if len(self._registered) >= self._most:
            raise BridgeError(
                f"cannot register '{name}': expected at most {self._most} regions at once "
                "(--client-shm-max-regions), got one more; unregister those that are not needed",
                ErrorCode.UNAVAILABLE,
            )
        region = self._owner << 32 | next(self._numbers)
        segment = ClientSegment.open(region, key, offset, nbytes)
        self._registered[name] = ClientRegion(name, key, offset, nbytes, segment)

    def unregister(self, name: str) -> None:
        """Forget a region, and have stubs unmap it; nothing happens where there is none.

        Raises
        ------
        BridgeError
            INTERNAL while a request uses it.
        """
        region = self._registered.get(name)
        if region is None:
            return
        if region.uses:
            raise BridgeError(
                f"Cannot unregister shared memory region '{name}', it is currently in use.",
                ErrorCode.INTERNAL,
            )
        del self._registered[name]
        # The descriptor goes with the last who holds the segment: memory that a model keeps.
        self._all.drop(region.segment.region)

    def unregister_all(self) -> None:
        """Forget every region that no request uses.

        Raises
        ------
        BridgeError
            INTERNAL, with the names of the others.
        """
        used = []
        for name in sorted(self._registered):
            try:
                self.unregister(name)
            except BridgeError:
                used.append(name)
        if used:
            names = "".join(f"{name} ," for name in used)
            raise BridgeError(
                f"Failed to unregister the following system shared memory regions: {names}",
                ErrorCode.INTERNAL,
            )

    def status(self, name: str = "") -> list[ClientRegion]:
        """Return the region of a name, or with an empty one all of them, by name.

        Raises
        ------
        BridgeError
            NOT_FOUND for an unknown name.
        """
        if not name:
            return [self._registered[known] for known in sorted(self._registered)]
        if name not in self._registered:
            raise BridgeError(
                f"Unable to find system shared memory region: '{name}'", ErrorCode.NOT_FOUND
            )
        return [self._registered[name]]

    def place(self, name: str, offset: int, nbytes: int) -> ClientPlace:
        """Return bytes of a region that a request names.

        Raises
        ------
        BridgeError
            NOT_FOUND for an unknown name, INVALID_ARG for bytes beyond the region, or where the
            object has been shrunk.
        """
        region = self._registered.get(name)
        if region is None:
            raise BridgeError(f"Unable to find shared memory region: '{name}'", ErrorCode.NOT_FOUND)
        if not 0 <= offset < region.nbytes:
            raise BridgeError(
                f"Invalid offset for shared memory region: '{name}'", ErrorCode.INVALID_ARG
            )
        if not 0 < nbytes <= region.nbytes - offset:
            raise BridgeError(
                f"Invalid offset + byte size for shared memory region: '{name}'",
                ErrorCode.INVALID_ARG,
            )
        begin = region.offset + offset
        # Nobody can hinder the client from shrinking it later; then the stub that touches it dies.
        if not region.segment.has(begin + nbytes):
            raise BridgeError(
                f"shared memory region '{name}': the object '{region.key}' was shrunk after it had "
                f"been registered with {region.nbytes} bytes; unregister it and register it again",
                ErrorCode.INVALID_ARG,
            )
        return ClientPlace(region, begin, nbytes)

    def close(self) -> None:
        """Close every object, whoever uses it."""
        for region in self._registered.values():
            self._all.drop(region.segment.region)
            region.segment.close()
        self._registered.clear()
