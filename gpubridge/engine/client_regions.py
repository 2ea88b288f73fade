"""The shared memory that clients have registered: names, rules, and who is using it now."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gpubridge.cuda_ipc import CudaError, DeviceInfo, open_client_region
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.devices.region import ClientDeviceSegment
from gpubridge.engine.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode, invalid, not_found, unavailable, unsupported
from gpubridge.host_shm import ClientSegment

_LOOKS = 15
_PAUSE = 0.005
_SWITCHED_OFF = (
    "shared memory is off on this server: start it with --allow-client-shm=true if its clients "
    "may have their memory mapped, or send the tensors"
)


_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientRegion:
    """One registration.

    - ``key``: the name of the object in /dev/shm, empty for device memory.
    - ``offset``, ``nbytes``: where in the object it begins; its bytes.
    - ``uses``: requests in flight that it is used by.
    """

    name: str
    key: str
    offset: int
    nbytes: int
    segment: ClientSegment | ClientDeviceSegment
    device_id: int | None = None
    uses: int = 0

    @property
    def on_device(self) -> bool:
        """Return whether it is CUDA memory."""
        return self.device_id is not None

    def described(self) -> dict[str, Any]:
        """Return what clients are told of it."""
        said: dict[str, Any] = {"name": self.name}
        if self.on_device:
            said["device_id"] = self.device_id
        else:
            said.update(key=self.key, offset=self.offset)
        return {**said, "byte_size": self.nbytes}


class ClientPlace(NamedTuple):
    """Some bytes of a registered region; ``offset`` is that in the object."""

    region: ClientRegion
    offset: int
    nbytes: int


class RegionUse:
    """The use of regions by one request: they cannot be unregistered while this object lives.

    ``outputs``: the outputs that the stub writes to such places.
    """

    __slots__ = ("_regions", "outputs")

    def __init__(self, places: Iterable[ClientPlace], outputs: Sequence[str]) -> None:
        self._regions = {place.region for place in places}
        self.outputs = frozenset(outputs)
        for region in self._regions:
            region.uses += 1

    @property
    def segments(self) -> list[ClientSegment | ClientDeviceSegment]:
        """Return the segments that the stub has to have mapped."""
        return [region.segment for region in self._regions]

    def __del__(self) -> None:
        for region in self._regions:
            region.uses -= 1


class ClientRegions:
    """Registers clients' POSIX and CUDA shared memory; owns what it has opened.

    The rules and texts are Triton's, except that one object may be registered under several names,
    and that an offset need not be that of a page.

    ``most``: how many regions there may be at once; each costs a descriptor here.
    """

    def __init__(
        self, regions: Regions, devices: DeviceMemory, *, allowed: bool, most: int
    ) -> None:
        self._all = regions
        self._allowed = allowed
        self._most = most
        self._owner = regions.new_owner()
        self._numbers = itertools.count(1)
        self._registered: dict[str, ClientRegion] = {}
        # Objects of the latest that were revoked.
        self._revoked: dict[str, str] = {}
        regions.revoke_shrunk = self.revoke_shrunk
        regions.close_registered = self.close
        # Names of device memory that is being opened.
        self._coming: set[str] = set()
        self._devices = devices
        # Each handle is opened once, however many names it is registered under.
        self._open: weakref.WeakValueDictionary[tuple[str, bytes, int], ClientDeviceSegment] = (
            weakref.WeakValueDictionary()
        )

    def _new_region(self) -> int:
        return self._owner << 32 | next(self._numbers)

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open an object under a name.

        Raises BridgeError: UNSUPPORTED when that is switched off, ALREADY_EXISTS for a name in use,
        UNAVAILABLE when there are too many, INTERNAL when the object cannot be opened or is too
        small.
        """
        self._check_new(name)
        segment = ClientSegment.open(self._new_region(), key, offset, nbytes)
        self._revoked.pop(name, None)
        self._registered[name] = ClientRegion(name, key, offset, nbytes, segment)

    async def register_device(self, name: str, handle: bytes, device_id: int, nbytes: int) -> None:
        """Open CUDA memory under a name.

        ``handle``: 64 bytes, as the client's driver gave them.

        Raises BridgeError as :meth:`register` does; INVALID_ARG when it is no such memory of that
        GPU.
        """
        self._check_new(name)
        self._coming.add(name)
        try:
            segment = await self._open_device(name, handle, device_id, nbytes)
        finally:
            self._coming.discard(name)
        others = [region.segment for region in self._registered.values()]
        self._registered[name] = ClientRegion(name, "", 0, nbytes, segment, device_id)
        # A stub that has such memory of clients will be handed this, too: it opens it before that.
        near = [
            other.region
            for other in others
            if isinstance(other, ClientDeviceSegment) and other.uuid == segment.uuid
        ]
        self._all.tell_ahead(segment, near)

    async def _open_device(
        self, name: str, handle: bytes, device_id: int, nbytes: int
    ) -> ClientDeviceSegment:
        """Open what a client registers; checked to be on that device, and to have so many bytes."""
        try:
            # It may be the first time that somebody asks for a GPU.
            device = await self._devices.run(partial(self._devices.device, device_id))
            return await self._devices.run(partial(self._opened, device, handle, nbytes))
        except CudaError as error:
            raise _refused(name, error.message, error.code) from error
        except BridgeError as error:
            raise _refused(name, error.message, ErrorCode.INVALID_ARG) from error

    def _opened(self, device: DeviceInfo, handle: bytes, nbytes: int) -> ClientDeviceSegment:
        """Open it, on the driver's thread."""
        key = device.uuid, handle, nbytes
        segment = self._open.get(key)
        if segment is None:
            region = open_client_region(self._devices.context(device), handle, nbytes)
            segment = ClientDeviceSegment(region, self._new_region(), handle, self._devices.free)
            self._open[key] = segment
        return segment

    def _check_new(self, name: str) -> None:
        if not self._allowed:
            raise unsupported(f"cannot register '{name}': {_SWITCHED_OFF}")
        if name in self._registered or name in self._coming:
            raise BridgeError(
                f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS
            )
        if len(self._registered) + len(self._coming) >= self._most:
            raise unavailable(
                f"cannot register '{name}': expected at most {self._most} regions at once "
                "(--client-shm-max-regions), got one more; unregister those that are not needed"
            )

    def revoke_shrunk(self, known: Collection[int]) -> bool:
        """Forget the regions whose objects have been shrunk, even those in use.

        Returns whether one of them was among those ``known`` to a stub, by its number.
        """
        shrunk = [
            region
            for region in self._registered.values()
            if isinstance(region.segment, ClientSegment)
            and not region.segment.has(region.segment.size)
        ]
        # Before stubs are told to unmap them, and know them no more.
        was_known = any(region.segment.region in known for region in shrunk)
        for region in shrunk:
            _logger.warning(
                "shared memory region '%s' is revoked: its client has shrunk the object '%s'",
                region.name,
                region.key,
            )
            del self._registered[region.name]
            self._all.drop(region.segment.region)
            self._revoked[region.name] = region.key
            if len(self._revoked) > self._most:
                del self._revoked[next(iter(self._revoked))]
        return was_known

    def unregister(self, name: str, *, on_device: bool = False) -> None:
        """Forget a region, or with an empty name every one that no request uses; stubs unmap it.

        Nothing happens where there is none of the kind.

        Raises BridgeError: INTERNAL while a request uses it, with the names of all that are used.
        """
        if name:
            if not self._unregister(name, on_device):
                raise BridgeError(
                    f"Cannot unregister shared memory region '{name}', it is currently in use.",
                    ErrorCode.INTERNAL,
                )
            return
        used = [name for name in sorted(self._registered) if not self._unregister(name, on_device)]
        if used:
            names = "".join(f"{name} ," for name in used)
            raise BridgeError(
                f"Failed to unregister the following {_kind(on_device)} shared memory regions: "
                f"{names}",
                ErrorCode.INTERNAL,
            )

    def _unregister(self, name: str, on_device: bool) -> bool:
        """Forget a region; returns False where that cannot be."""
        region = self._registered.get(name)
        if region is None or region.on_device != on_device:
            if not on_device:
                self._revoked.pop(name, None)
            return True
        if region.uses:
            # A stream of a model may have been done with it only after the last answer.
            self._all.settle(region.segment.region)
        if region.uses:
            return False
        del self._registered[name]
        # The descriptor goes with the last who holds the segment: memory that a model keeps.
        if not any(other.segment is region.segment for other in self._registered.values()):
            self._all.drop(region.segment.region)
        return True

    async def unregister_device(self, name: str) -> None:
        """Forget CUDA memory, or with an empty name all of it, as the others do.

        A stream of a model in the midst of an ensemble may be done with it a moment after the answer
        has left: a client need not know that.

        Raises BridgeError: INTERNAL while a request uses it.
        """
        for look in range(_LOOKS):
            try:
                self.unregister(name, on_device=True)
                return
            except BridgeError:
                if look == _LOOKS - 1:
                    raise
            await asyncio.sleep(_PAUSE)

    def status(self, name: str = "", *, on_device: bool = False) -> list[ClientRegion]:
        """Return the region of a name, or with an empty one all of the kind, by name.

        Raises BridgeError: NOT_FOUND for an unknown name.
        """
        if not name:
            known = (self._registered[each] for each in sorted(self._registered))
            return [region for region in known if region.on_device == on_device]
        region = self._registered.get(name)
        if region is None or region.on_device != on_device:
            raise not_found(f"Unable to find {_kind(on_device)} shared memory region: '{name}'")
        return [region]

    def place(self, name: str, offset: int, nbytes: int) -> ClientPlace:
        """Return bytes of a region that a request names.

        Raises BridgeError: NOT_FOUND for an unknown name, INVALID_ARG for bytes beyond the region,
        or where the object has been shrunk.
        """
        region = self._registered.get(name)
        if region is None and name in self._revoked:
            raise invalid(
                f"shared memory region '{name}' was revoked: the object '{self._revoked[name]}' was "
                "shrunk while a model used it; register it again"
            )
        if region is None:
            raise not_found(f"Unable to find shared memory region: '{name}'")
        if not 0 <= offset < region.nbytes:
            raise invalid(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < nbytes <= region.nbytes - offset:
            raise invalid(f"Invalid offset + byte size for shared memory region: '{name}'")
        begin = region.offset + offset
        # The client can shrink it later all the same.
        if not region.segment.has(begin + nbytes):
            raise invalid(
                f"shared memory region '{name}': the object '{region.key}' was shrunk after it had "
                f"been registered with {region.nbytes} bytes; unregister it and register it again"
            )
        return ClientPlace(region, begin, nbytes)

    def close(self) -> None:
        """Close every object, whoever uses it."""
        for region in self._registered.values():
            self._all.drop(region.segment.region)
            if isinstance(region.segment, ClientSegment):
                region.segment.close()
        self._registered.clear()


def _refused(name: str, reason: str, code: ErrorCode) -> BridgeError:
    return BridgeError(f"failed to register CUDA shared memory region '{name}': {reason}", code)


def _kind(on_device: bool) -> str:
    return "cuda" if on_device else "system"
