"""The server's device memory: the arenas that stubs put their outputs into.

All calls of the driver are made on one thread of its own, never on the event loop. Nothing of CUDA is
loaded before somebody asks for a device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from gpubridge.config.python_backend import DeviceMemoryHandles
from gpubridge.cuda_ipc import (
    CopyStream,
    CudaError,
    DeviceContext,
    DeviceInfo,
    DeviceProbe,
    DeviceSegment,
    probe_devices,
    visibility,
)
from gpubridge.engine.devices.driver_thread import ServerDriverThread
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.engine.devices.host_copies import HostCopies
from gpubridge.engine.devices.peer_memory import PeerMemory
from gpubridge.engine.devices.region import Closable, DeviceRegion
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.instance_settings import InstanceSettings
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import BridgeError, ErrorCode, invalid, unsupported
from gpubridge.telemetry.exposition import Family

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance
    from gpubridge.engine.stub_connection import StubConnection

_logger = logging.getLogger(__name__)

_NAMES = {False: "legacy IPC handles", True: "VMM file descriptors"}
_Result = TypeVar("_Result")


class MemorySharing:
    """Allocates device memory that stubs can open."""

    def __init__(self, handles: DeviceMemoryHandles) -> None:
        self._ways = {"auto": (False, True), "legacy": (False,), "fd": (True,)}[handles]
        # GPUs, and whether by descriptors: what a stub could not open, so that it is tried last.
        self._doubted: set[tuple[str, bool]] = set()
        self._said: set[tuple[str, bool]] = set()

    def allocate(
        self,
        context: DeviceContext,
        region: int,
        size: int,
        refusals: Mapping[bool, str] = MappingProxyType({}),
    ) -> DeviceSegment:
        """Allocate at least ``size`` bytes by the first way that works.

        ``refusals``: the ways that whoever is to open it could not open already, and why: False for
        handles, True for descriptors.

        Raises CudaError: UNAVAILABLE when the device has no memory left, INTERNAL when its context
        is lost.
        Raises BridgeError: UNSUPPORTED when it cannot be shared; says why.
        """
        uuid = context.device.uuid
        reasons = dict(refusals)
        for by_fd in sorted(self._ways, key=lambda way: (uuid, way) in self._doubted):
            if by_fd in refusals:
                continue
            try:
                segment = DeviceSegment.allocate(context, region, size, by_fd=by_fd)
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                reasons[by_fd] = error.message
            else:
                self._say(uuid, by_fd, reasons.get(not by_fd))
                return segment
        told = "; ".join(f"no {_NAMES[by_fd]}: {reasons[by_fd]}" for by_fd in self._ways)
        raise unsupported(f"memory of GPU {uuid} does not cross processes: {told}")

    def doubt(self, uuid: str, by_fd: bool) -> None:
        """A stub could not open memory of a GPU that was shared in this way."""
        self._doubted.add((uuid, by_fd))

    def _say(self, uuid: str, by_fd: bool, refusal: str | None) -> None:
        if (uuid, by_fd) in self._said:
            return
        self._said.add((uuid, by_fd))
        why = "" if refusal is None else f", since {_NAMES[not by_fd]} are refused: {refusal}"
        _logger.info("memory of GPU %s crosses processes by %s%s", uuid, _NAMES[by_fd], why)


class DeviceMemory:
    """The GPUs of this machine, and the server's memory on them.

    - ``handles``: by what it may cross to the stub.
    - ``events``: says where stubs wait for each other's events.

    Attribute ``used``: whether any tensor may be on a GPU; ``copies``: those between it and host memory.
    """

    def __init__(
        self,
        arena_bytes: int,
        handles: DeviceMemoryHandles = "auto",
        events: EventSharing | None = None,
    ) -> None:
        self.arena_bytes = arena_bytes
        self.sharing = MemorySharing(handles)
        self.events = events or EventSharing()
        self._arenas: WeakSet[DeviceRegion] = WeakSet()
        self._lock = threading.Lock()
        self._probe: DeviceProbe | None = None
        self._told = False
        self._contexts: dict[str, DeviceContext] = {}
        self._streams: dict[str, CopyStream] = {}
        self._thread: ServerDriverThread | None = None
        self.used = False
        self._releases = TaskSet()
        self.peers = PeerMemory(self)
        self.copies = HostCopies(self)
        self._lost = ""
        self._users: WeakSet[Instance] = WeakSet()

    # -- devices -------------------------------------------------------------------------------

    def probe(self) -> DeviceProbe:
        """Look for GPUs, once; any thread may, but for the first time it may take a while."""
        with self._lock:
            if self._probe is None:
                self._probe = probe = probe_devices()
                if probe.count:
                    _logger.info("%d GPUs found", probe.count)
                else:
                    _logger.debug("no GPU is used: %s", probe.reason)
            return self._probe

    def tell_absence(self) -> None:
        """Say, once, why there is no GPU: a model has asked for one."""
        if not self._told and not self.count():
            self._told = True
            _logger.info("no GPU is used: %s", self.probe().reason.partition(":")[0])

    def count(self) -> int:
        """Return the number of GPUs."""
        return self.probe().count

    def device(self, ordinal: int) -> DeviceInfo:
        """Return the GPU of a number; raises BridgeError."""
        devices = self.probe().devices
        if not 0 <= ordinal < len(devices):
            known = ", ".join(str(device.ordinal) for device in devices)
            known = known or f"none: {self.probe().reason}"
            raise invalid(f"expected the number of a GPU of this machine ({known}), got {ordinal}")
        return devices[ordinal]

    # -- arenas --------------------------------------------------------------------------------

    async def equip(self, settings: InstanceSettings, link: StubConnection) -> dict[str, Any]:
        """Return what a stub is told when it starts: of its GPU, if it has one, where that is.

        Nothing is made there before somebody needs it. Raises BridgeError when the driver fails.
        """
        if settings.device is None:
            return settings.stub
        device = self.device(settings.device)
        await self.run(partial(self.peers.look_at, device))
        arena = StubArena(self, device, link, settings.name)
        link.give_device(arena, device.uuid, self)
        told = {
            "uuid": device.uuid,
            "visible": visibility(),
            "limit": self.arena_bytes,
            "server": os.getpid(),
        }
        return {**settings.stub, "device": told}

    def note_arena(self, segment: DeviceRegion) -> None:
        """Count a segment of a stub's arena, as long as it exists."""
        self._arenas.add(segment)

    def families(self) -> list[Family]:
        """Return how many stubs have an arena on each GPU, by what they have opened it."""
        family = Family(
            "gpubridge_device_arenas",
            "Device memory of stubs that others can open, by how it crosses processes",
            "gauge",
        )
        # By the maker that the id names: an arena may have several segments.
        arenas = {
            (segment.uuid, "fd" if segment.fds else "legacy", segment.region >> 32)
            for segment in self._arenas
        }
        for (uuid, handles), count in Counter(each[:2] for each in arenas).items():
            family.add({"gpu_uuid": uuid, "handles": handles}, count)
        return [family, *self.events.families()]

    def region_of(self, segment: DeviceSegment) -> DeviceRegion:
        """Make an allocation known as a region of the server's own."""
        return DeviceRegion(segment, self.free)

    def release_waiters(self, arena: DeviceRegion, numbers: list[int]) -> None:
        """Let streams go that wait for events of a stub which is dead."""

        async def release() -> None:
            # The arena is held as long.
            if arena.events is not None:
                await arena.events.pass_for_dead(self, numbers)
                self.events.await_release(arena, numbers, arena.events.loss)

        self._releases.start(release())

    def free(self, segment: Closable) -> None:
        """Free or close memory that is no longer used; from any thread, or finalizer."""
        thread = self._thread
        # Without it the server ends, and the memory goes with it.
        if thread is not None:
            thread.submit(partial(_close, segment))

    # -- the driver's thread -------------------------------------------------------------------

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Do something on the thread that calls the driver; raises what that raises.

        Who is cancelled meanwhile leaves nothing behind: the result is dropped when it is there.
        """
        self.used = True
        with self._lock:
            if self._thread is None:
                self._thread = ServerDriverThread()
            thread = self._thread
        with self.noting_loss():
            return await thread.run(work)

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Find out from the errors raised inside whether the server has lost its GPUs."""
        try:
            yield
        except CudaError as error:
            if error.sticky:
                self._lose(error)
            raise

    def join(self, user: Instance) -> None:
        """An instance is up: it is told when the server cannot use its GPUs any more."""
        self._users.add(user)
        if self._lost:
            user.keep_device_alone(self._lost)

    def _lose(self, error: CudaError) -> None:
        """Every further call would fail: let what the server would have to copy come by the host.

        It happens where a client's memory goes while it is copied. Stubs have contexts of their own.
        """
        if self._lost:
            return
        self._lost = f"the server's context on its GPUs is lost: {error.message}"
        _logger.error(
            "%s; models go on, and all tensors cross in host memory; clients' memory on GPUs is "
            "refused where the server would have to copy",
            self._lost,
        )
        for user in tuple(self._users):
            user.keep_device_alone(self._lost)

    def stream(self, uuid: str) -> CopyStream:
        """Return the server's stream on a GPU; on the driver's thread only."""
        stream = self._streams.get(uuid)
        if stream is None:
            (device,) = [each for each in self.probe().devices if each.uuid == uuid]
            stream = self._streams[uuid] = CopyStream(self.context(device))
        return stream

    def context(self, device: DeviceInfo) -> DeviceContext:
        """Return the server's context on a GPU; on the driver's thread only."""
        context = self._contexts.get(device.uuid)
        if context is None:
            context = self._contexts[device.uuid] = DeviceContext(device)
        return context

    async def close(self) -> None:
        """Give everything back, once nobody uses device memory any more."""
        await self.events.close()
        thread = self._thread
        if thread is None:
            return
        await self._releases.finished()
        self.peers.close()
        await self.run(self._close_contexts)
        self._thread = None
        thread.close()

    def _close_contexts(self) -> None:
        self.copies.close()
        owned: list[CopyStream | DeviceContext] = [
            *self._streams.values(),
            *self._contexts.values(),
        ]
        self._streams, self._contexts = {}, {}
        for each in owned:
            try:
                each.close()
            except BridgeError as error:
                _logger.warning("a device is left as it is: %s", error.message)


def _close(segment: Closable) -> None:
    try:
        segment.close()
    except BridgeError as error:
        # The memory goes with the process.
        _logger.warning("device memory cannot be freed: %s", error.message)
