"""Shared memory registered by clients: names, validation, and requests that use it."""

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
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.device_region import ClientDeviceSegment
from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode, invalid, not_found, unavailable, unsupported
from gpubridge.host_shm import ClientSegment

_UNREGISTER_PAUSES = (*[0.005] * 14, *[0.04] * 12)
"""Half a second: streams of processes that take turns on a GPU wait for the turns of all others."""
_SWITCHED_OFF = (
    "shared memory is off on this server: start it with --allow-client-shm=true if its clients "
    "may have their memory mapped, or send the tensors"
)


_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientRegion:
    """One registration.

    - ``key``: the name of the object in /dev/shm, empty for device memory.
    - ``offset``, ``nbytes``: the range in the object.
    - ``uses``: number of requests in flight that use it.
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
        """Return its status for clients."""
        said: dict[str, Any] = {"name": self.name}
        if self.on_device:
            said["device_id"] = self.device_id
        else:
            said.update(key=self.key, offset=self.offset)
        return {**said, "byte_size": self.nbytes}


class ClientPlace(NamedTuple):
    """A range of a registered region; ``offset`` counts from the begin of the object."""

    region: ClientRegion
    offset: int
    nbytes: int


class RegionUse:
    """The use of regions by one request; while this object exists, they cannot be unregistered.

    ``outputs``: the outputs that the stub writes to the regions.
    """

    __slots__ = ("_regions", "outputs")

    def __init__(self, places: Iterable[ClientPlace], outputs: Sequence[str]) -> None:
        self._regions = {place.region for place in places}
        self.outputs = frozenset(outputs)
        for region in self._regions:
            region.uses += 1

    @property
    def segments(self) -> list[ClientSegment | ClientDeviceSegment]:
        """Return the segments that the stub must map."""
        return [region.segment for region in self._regions]

    def __del__(self) -> None:
        for region in self._regions:
            region.uses -= 1


class ClientRegions:
    """Registers clients' POSIX and CUDA shared memory; owns the opened memory.

    Rules and error texts are Triton's, except that one object may be registered under several names,
    and that an offset need not be a multiple of the page size.

    ``most``: limit of registered regions; each needs a descriptor.
    """

    def __init__(
        self, regions: Regions, devices: DeviceManager, *, allowed: bool, most: int
    ) -> None:
        self._regions = regions
        self._allowed = allowed
        self._most = most
        self._owner = regions.new_owner()
        self._numbers = itertools.count(1)
        self._registered: dict[str, ClientRegion] = {}
        # Objects of recently revoked regions, by name.
        self._revoked: dict[str, str] = {}
        regions.revoke_shrunk = self.revoke_shrunk
        regions.close_registered = self.close
        # Names of device memory being opened.
        self._opening: set[str] = set()
        self._devices = devices
        # Each handle is opened once for all its names.
        self._open: weakref.WeakValueDictionary[tuple[str, bytes, int], ClientDeviceSegment] = (
            weakref.WeakValueDictionary()
        )

    def _new_region(self) -> int:
        return self._owner << 32 | next(self._numbers)

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open an object under a name.

        Raises BridgeError: UNSUPPORTED when client memory is disabled, ALREADY_EXISTS for a name in
        use, UNAVAILABLE beyond the limit, INTERNAL when the object cannot be opened or is too small.
        """
        self._check_new(name)
        segment = ClientSegment.open(self._new_region(), key, offset, nbytes)
        self._revoked.pop(name, None)
        self._registered[name] = ClientRegion(name, key, offset, nbytes, segment)

    async def register_device(self, name: str, handle: bytes, device_id: int, nbytes: int) -> None:
        """Open CUDA memory under a name.

        ``handle``: the 64 bytes of the CUDA IPC handle.

        Raises BridgeError as :meth:`register` does; INVALID_ARG when the handle is invalid on that
        GPU.
        """
        self._check_new(name)
        self._opening.add(name)
        try:
            segment = await self._open_device(name, handle, device_id, nbytes)
        finally:
            self._opening.discard(name)
        others = [region.segment for region in self._registered.values()]
        self._registered[name] = ClientRegion(name, "", 0, nbytes, segment, device_id)
        # Stubs that use other memory of clients will probably need this: they open it in advance.
        near = [
            other.region
            for other in others
            if isinstance(other, ClientDeviceSegment) and other.uuid == segment.uuid
        ]
        self._regions.announce_ahead(segment, near)

    async def _open_device(
        self, name: str, handle: bytes, device_id: int, nbytes: int
    ) -> ClientDeviceSegment:
        """Open a handle, and check its device and size."""
        try:
            # On the driver thread, as this may probe the GPUs.
            device = await self._devices.run(partial(self._devices.gpus.device, device_id))
            return await self._devices.run(partial(self._opened, device, handle, nbytes))
        except CudaError as error:
            raise _refused(name, error.message, error.code) from error
        except BridgeError as error:
            raise _refused(name, error.message, ErrorCode.INVALID_ARG) from error

    def _opened(self, device: DeviceInfo, handle: bytes, nbytes: int) -> ClientDeviceSegment:
        """Open a handle on the driver thread, once for all its names."""
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
        if name in self._registered or name in self._opening:
            raise BridgeError(
                f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS
            )
        if len(self._registered) + len(self._opening) >= self._most:
            raise unavailable(
                f"cannot register '{name}': expected at most {self._most} regions at once "
                "(--client-shm-max-regions), got one more; unregister those that are not needed"
            )

    def revoke_shrunk(self, known: Collection[int]) -> bool:
        """Unregister the regions whose objects were shrunk, even regions in use.

        Returns whether a region of them is in ``known``, the region ids that a stub knows.
        """
        shrunk = [
            region
            for region in self._registered.values()
            if isinstance(region.segment, ClientSegment)
            and not region.segment.has(region.segment.size)
        ]
        # Before `drop` removes them from ``known``.
        was_known = any(region.segment.region in known for region in shrunk)
        for region in shrunk:
            _logger.warning(
                "shared memory region '%s' is revoked: its client has shrunk the object '%s'",
                region.name,
                region.key,
            )
            del self._registered[region.name]
            self._regions.drop(region.segment.region)
            self._revoked[region.name] = region.key
            if len(self._revoked) > self._most:
                del self._revoked[next(iter(self._revoked))]
        return was_known

    def unregister(self, name: str, *, on_device: bool = False) -> None:
        """Unregister a region, or with an empty name every unused region; stubs unmap it.

        Unknown names are ignored.

        Raises BridgeError: INTERNAL, with the names of the regions that requests use.
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
        """Unregister a region; return False if a request uses it."""
        region = self._registered.get(name)
        if region is None or region.on_device != on_device:
            if not on_device:
                self._revoked.pop(name, None)
            return True
        if region.uses:
            # A model's stream may have released it after the last response.
            self._regions.release_kept(region.segment.region)
        if region.uses:
            return False
        del self._registered[name]
        # The descriptor is closed with the last reference: a model may keep the memory.
        if not any(other.segment is region.segment for other in self._registered.values()):
            self._regions.drop(region.segment.region)
        return True

    async def unregister_device(self, name: str) -> None:
        """Unregister CUDA memory, or with an empty name every unused CUDA region.

        Retries for a moment, as a stream of an ensemble's member may release the memory shortly after
        the response.

        Raises BridgeError: INTERNAL while a request uses it.
        """
        for pause in _UNREGISTER_PAUSES:
            try:
                self.unregister(name, on_device=True)
                return
            except BridgeError:
                await asyncio.sleep(pause)
        self.unregister(name, on_device=True)

    def status(self, name: str = "", *, on_device: bool = False) -> list[ClientRegion]:
        """Return the region of a name, or all regions of the kind, by name.

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
        """Return a range of a region for a request.

        Raises BridgeError: NOT_FOUND for an unknown name, INVALID_ARG for a range beyond the region,
        or if the object was shrunk.
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
        # The client can still shrink it later.
        if not region.segment.has(begin + nbytes):
            raise invalid(
                f"shared memory region '{name}': the object '{region.key}' was shrunk after it had "
                f"been registered with {region.nbytes} bytes; unregister it and register it again"
            )
        return ClientPlace(region, begin, nbytes)

    def close(self) -> None:
        """Close every object, even those in use."""
        for region in self._registered.values():
            self._regions.drop(region.segment.region)
            if isinstance(region.segment, ClientSegment):
                region.segment.close()
        self._registered.clear()


def _refused(name: str, reason: str, code: ErrorCode) -> BridgeError:
    return BridgeError(f"failed to register CUDA shared memory region '{name}': {reason}", code)


def _kind(on_device: bool) -> str:
    return "cuda" if on_device else "system"
