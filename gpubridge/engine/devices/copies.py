"""Copies by the server: from GPU to GPU, and between GPUs and host memory.

The server has a context on every GPU with instances and owns all arenas, so it can copy between any
two GPUs. Tensors from another GPU are copied to memory of the server on the target GPU, which stubs
open like other memory of their GPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from gpubridge.cuda_ipc import (
    Ability,
    CudaError,
    DeviceArena,
    DeviceContext,
    DeviceInfo,
    Part,
    StagedCopies,
    enable_peer_access,
    probe_peers,
)
from gpubridge.engine.memory.device_region import DeviceRegion
from gpubridge.engine.memory.placed_response import SharedSlot
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import MemoryRange
from gpubridge.transport.device_events import arena_region

if TYPE_CHECKING:
    from gpubridge.engine.devices.manager import DeviceManager


PEER_FALLBACKS = {
    "no_peer_access": "one GPU cannot reach the other's memory: tensors go through host memory",
    "peer_memory_absent": "no memory for tensors of other GPUs: they go through host memory",
    "peer_memory_full": "the memory for tensors of other GPUs is full: they go through host memory",
}
"""Reasons for which tensors are not copied from GPU to GPU, as the metric of fallbacks has them."""

_logger = logging.getLogger(__name__)
_SERVER = 0


class NoPeerCopy(BridgeError):
    """The tensors must be copied through host memory; ``reason``: the label of the fallback metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)
        self.reason = reason


class PeerMemory:
    """Copies tensors from one GPU to another.

    ``devices``: the GPUs. Methods that call the driver run on its thread.
    """

    def __init__(self, devices: DeviceManager) -> None:
        self._devices = devices
        self._abilities: dict[tuple[str, str], Ability] = {}
        self._enabled: set[tuple[str, str]] = set()
        self._reached: set[tuple[str, str]] = set()
        self._arenas: dict[str, tuple[DeviceRegion, DeviceArena]] = {}
        self._without: dict[str, str] = {}

    def probe_device(self, device: DeviceInfo) -> None:
        """Determine which GPUs have peer access to one that gets an instance; creates no context."""
        for other in self._devices.gpus.probe().devices:
            for one, peer in ((device, other), (other, device)):
                if one != peer and (one.uuid, peer.uuid) not in self._abilities:
                    self._abilities[one.uuid, peer.uuid] = probe_peers(one, peer)

    def reaches(self, source: str, target: str) -> bool:
        """Return whether tensors can be copied from one GPU to another; callable on any thread."""
        ability = self._abilities.get((source, target))
        return ability is not None and ability.works

    def copy_to(self, parts: Sequence[MemoryRange], target: str) -> list[MemoryRange]:
        """Copy tensors to a GPU, and wait for the copies.

        - ``parts``: completed tensors of at least one byte each, on other GPUs.
        - ``target``: the UUID of a GPU with instances.

        Raises NoPeerCopy: no peer access between these GPUs, or the memory is full.
        """
        for source in {part.segment.uuid for part in parts}:
            self._enable(source, target)
        region, arena = self._arena(target)
        for source in {part.segment.uuid for part in parts}:
            self._grant_access(arena, source, target)
        copied = []
        for part in parts:
            try:
                slot = arena.allocate(part.nbytes)
            except BridgeError as error:
                raise NoPeerCopy("peer_memory_full", error.message) from error
            # Freed with the last reference to the tensor.
            held = SharedSlot(arena.free, slot)
            copied.append(MemoryRange(region, slot.offset, part.nbytes, held))
        peer = self._context(target)
        try:
            for (segment, offset, nbytes, _), to in zip(parts, copied, strict=True):
                stream = self._devices.stream(segment.uuid)
                stream.p2p(region.pointer + to.offset, peer, segment.pointer + offset, nbytes)
        finally:
            # Copies that were started write to the slots, also after an error.
            for uuid in {part.segment.uuid for part in parts}:
                self._devices.stream(uuid).wait()
        return copied

    def close(self) -> None:
        """Release the memory; it is freed with the last reference to a tensor in it."""
        self._arenas.clear()

    def _enable(self, source: str, target: str) -> None:
        ability = self._abilities.get((source, target))
        if ability is None or not ability.works:
            reason = "the driver was not asked" if ability is None else ability.reason
            raise NoPeerCopy("no_peer_access", reason)
        if (source, target) in self._enabled:
            return
        try:
            enable_peer_access(self._context(source), self._context(target))
        except CudaError as error:
            if error.sticky:
                raise
            self._abilities[source, target] = Ability(error.message)
            raise NoPeerCopy("no_peer_access", error.message) from error
        self._enabled.add((source, target))

    def _grant_access(self, arena: DeviceArena, source: str, target: str) -> None:
        """Give the source GPU, whose stream copies, access to the memory, on the first copy only."""
        if (source, target) in self._reached:
            return
        try:
            arena.segment.allow_peer(self._context(source))
        except CudaError as error:
            if error.sticky:
                raise
            self._abilities[source, target] = Ability(error.message)
            raise NoPeerCopy("no_peer_access", error.message) from error
        self._reached.add((source, target))

    def _arena(self, target: str) -> tuple[DeviceRegion, DeviceArena]:
        if target in self._without:
            raise NoPeerCopy("peer_memory_absent", self._without[target])
        if target not in self._arenas:
            context = self._context(target)
            region = arena_region(_SERVER) + context.device.ordinal
            try:
                segment = self._devices.sharing.allocate(context, region, self._devices.arena_bytes)
            except BridgeError as error:
                if isinstance(error, CudaError) and error.sticky:
                    raise
                self._without[target] = error.message
                raise NoPeerCopy("peer_memory_absent", error.message) from error
            _logger.info("tensors from other GPUs are copied to memory of GPU %s", target)
            self._arenas[target] = self._devices.region_of(segment), DeviceArena(segment)
        return self._arenas[target]

    def _context(self, uuid: str) -> DeviceContext:
        return self._devices.context(self._devices.gpus.by_uuid(uuid))


_AT_ONCE = 4


class HostCopies:
    """Copies between GPUs and host memory through pinned buffers, for several requests at once.

    ``devices``: the GPUs.

    Methods raise BridgeError when the driver fails; no copy is in progress then.
    """

    def __init__(self, devices: DeviceManager) -> None:
        self._devices = devices
        self._staged: dict[str, StagedCopies] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def to_host(self, uuid: str, parts: Sequence[Part], keep: object) -> None:
        """Copy completed tensors from a GPU; keep ``keep`` alive until the end, even if cancelled."""
        await self._copy(uuid, parts, keep, to_host=True)

    async def to_device(self, uuid: str, parts: Sequence[Part], keep: object) -> None:
        """Copy to a GPU; see `to_host`."""
        await self._copy(uuid, parts, keep, to_host=False)

    async def _copy(self, uuid: str, parts: Sequence[Part], keep: object, *, to_host: bool) -> None:
        staged = self._staged.get(uuid)
        if staged is None:
            staged = await self._devices.run(partial(self._on_device, uuid))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="device-copies")
        work = partial(_work, staged, parts, keep, to_host)
        loop = asyncio.get_running_loop()
        with self._devices.noting_loss():
            # No frame of an error's traceback may refer to the future: the cycle would keep memory.
            await loop.run_in_executor(self._threads, work)

    def _on_device(self, uuid: str) -> StagedCopies:
        staged = self._staged.get(uuid)
        if staged is None:
            device = self._devices.gpus.by_uuid(uuid)
            staged = self._staged[uuid] = StagedCopies(self._devices.context(device))
        return staged

    def close(self) -> None:
        """Release everything, when no copy is in progress and before the contexts are destroyed."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        staged, self._staged = self._staged, {}
        for each in staged.values():
            try:
                each.close()
            except BridgeError:
                # The context is lost and ends with the process.
                pass


def _work(staged: StagedCopies, parts: Sequence[Part], keep: object, to_host: bool) -> None:
    del keep  # The `partial` being called refers to it.
    (staged.to_host if to_host else staged.to_device)(parts)
