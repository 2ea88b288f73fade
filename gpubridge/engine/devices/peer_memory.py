"""Memory of the server on each GPU, for tensors that come from another one: copied from GPU to GPU.

The server has a context on every GPU that has instances, and every arena is its own, so that it can
copy between any two. Stubs take such a tensor as any other of their GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubridge.cuda_ipc import (
    Ability,
    CudaError,
    DeviceArena,
    DeviceContext,
    DeviceInfo,
    enable_peer_access,
    probe_peers,
)
from gpubridge.engine.devices.region import DeviceRegion
from gpubridge.engine.lent_memory import SharedSlot
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import MemoryRange
from gpubridge.transport.device_events import arena_region

if TYPE_CHECKING:
    from gpubridge.engine.devices.memory import DeviceMemory

_logger = logging.getLogger(__name__)
_SERVER = 0


class NotByPeerCopy(BridgeError):
    """Tensors have to go by way of the host; ``reason`` is what that is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)
        self.reason = reason


class PeerMemory:
    """Brings tensors from one GPU to another.

    ``devices``: the GPUs; all that calls the driver here is run on its thread.
    """

    def __init__(self, devices: DeviceMemory) -> None:
        self._devices = devices
        self._abilities: dict[tuple[str, str], Ability] = {}
        self._enabled: set[tuple[str, str]] = set()
        self._reached: set[tuple[str, str]] = set()
        self._arenas: dict[str, tuple[DeviceRegion, DeviceArena]] = {}
        self._without: dict[str, str] = {}

    def look_at(self, device: DeviceInfo) -> None:
        """Find out which GPUs exchange memory with one that gets an instance; makes no context."""
        for other in self._devices.probe().devices:
            for one, peer in ((device, other), (other, device)):
                if one != peer and (one.uuid, peer.uuid) not in self._abilities:
                    self._abilities[one.uuid, peer.uuid] = probe_peers(one, peer)

    def reaches(self, source: str, target: str) -> bool:
        """Return whether tensors can be copied from a GPU to another; for any thread."""
        ability = self._abilities.get((source, target))
        return ability is not None and ability.works

    def bring(self, parts: Sequence[MemoryRange], target: str) -> list[MemoryRange]:
        """Copy tensors to a GPU; they are there on return.

        - ``parts``: complete, at least one byte each, on other GPUs.
        - ``target``: the UUID of one that has instances.

        Raises NotByPeerCopy: the driver does not do that between these, or there is no room.
        """
        for source in {part.segment.uuid for part in parts}:
            self._enable(source, target)
        region, arena = self._arena(target)
        for source in {part.segment.uuid for part in parts}:
            self._let_reach(arena, source, target)
        brought = []
        for part in parts:
            try:
                slot = arena.allocate(part.nbytes)
            except BridgeError as error:
                raise NotByPeerCopy("peer_memory_full", error.message) from error
            # It goes back with the last who looks at the tensor.
            held = SharedSlot(arena.free, slot)
            brought.append(MemoryRange(region, slot.offset, part.nbytes, held))
        peer = self._context(target)
        try:
            for (segment, offset, nbytes, _), to in zip(parts, brought, strict=True):
                stream = self._devices.stream(segment.uuid)
                stream.p2p(region.pointer + to.offset, peer, segment.pointer + offset, nbytes)
        finally:
            # Whatever was begun writes to those slots.
            for uuid in {part.segment.uuid for part in parts}:
                self._devices.stream(uuid).wait()
        return brought

    def close(self) -> None:
        """Free the memory, once nobody looks at it."""
        self._arenas.clear()

    def _enable(self, source: str, target: str) -> None:
        ability = self._abilities.get((source, target))
        if ability is None or not ability.works:
            reason = "nobody has asked the driver" if ability is None else ability.reason
            raise NotByPeerCopy("no_peer_access", reason)
        if (source, target) in self._enabled:
            return
        try:
            enable_peer_access(self._context(source), self._context(target))
        except CudaError as error:
            if error.sticky:
                raise
            self._abilities[source, target] = Ability(error.message)
            raise NotByPeerCopy("no_peer_access", error.message) from error
        self._enabled.add((source, target))

    def _let_reach(self, arena: DeviceArena, source: str, target: str) -> None:
        """Have the stream of the source, which copies, reach the memory; at the first time only."""
        if (source, target) in self._reached:
            return
        try:
            arena.segment.let_reach(self._context(source))
        except CudaError as error:
            if error.sticky:
                raise
            self._abilities[source, target] = Ability(error.message)
            raise NotByPeerCopy("no_peer_access", error.message) from error
        self._reached.add((source, target))

    def _arena(self, target: str) -> tuple[DeviceRegion, DeviceArena]:
        if target in self._without:
            raise NotByPeerCopy("peer_memory_absent", self._without[target])
        if target not in self._arenas:
            context = self._context(target)
            region = arena_region(_SERVER) + context.device.ordinal
            try:
                segment = self._devices.sharing.allocate(context, region, self._devices.arena_bytes)
            except BridgeError as error:
                if isinstance(error, CudaError) and error.sticky:
                    raise
                self._without[target] = error.message
                raise NotByPeerCopy("peer_memory_absent", error.message) from error
            _logger.info("tensors from other GPUs are copied to memory of GPU %s", target)
            self._arenas[target] = self._devices.region_of(segment), DeviceArena(segment)
        return self._arenas[target]

    def _context(self, uuid: str) -> DeviceContext:
        (device,) = [each for each in self._devices.probe().devices if each.uuid == uuid]
        return self._devices.context(device)
