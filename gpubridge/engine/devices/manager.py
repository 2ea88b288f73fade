"""The GPUs of the server: contexts, the driver thread, and device memory shared with stubs.

All driver calls are made on one thread, never on the event loop. CUDA is not loaded before a GPU is
needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from gpubridge.config.python_backend import DeviceMemoryHandles
from gpubridge.cuda_ipc import (
    CopyStream,
    CudaError,
    DeviceContext,
    DeviceInfo,
    DeviceProbe,
    DeviceSegment,
    DriverThread,
    probe_devices,
    visibility,
)
from gpubridge.engine.devices.copies import HostCopies, PeerMemory
from gpubridge.engine.devices.event_sharing import EventSharing
from gpubridge.engine.devices.stub_arena import StubArena
from gpubridge.engine.memory.device_region import Closable, DeviceRegion
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import BridgeError, ErrorCode, invalid, unsupported
from gpubridge.telemetry.exposition import Family
from gpubridge.transport.stub_settings import StubGpu

if TYPE_CHECKING:
    from gpubridge.engine.ipc.stub_connection import StubConnection
    from gpubridge.engine.supervisor.instance import Instance
    from gpubridge.engine.supervisor.instance_settings import InstanceSettings


_Result = TypeVar("_Result")


class AsyncDriverThread(DriverThread):
    """The thread for driver calls, with futures of the event loop."""

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return a future of the result; cancelling it before the work begins prevents the work."""
        # No frame of an error's traceback may refer to the future: the cycle would keep memory.
        future: Future[_Result] = Future()
        self.submit(partial(_complete, future, work))
        return asyncio.wrap_future(future)


def _complete(future: Future[_Result], work: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  (raised to the caller)
        future.set_exception(error)
        # This frame is in the traceback.
        del future


_logger = logging.getLogger(__name__)

_NAMES = {False: "legacy IPC handles", True: "VMM file descriptors"}


class MemorySharing:
    """Allocates device memory that stubs can open, by legacy IPC handles or file descriptors."""

    def __init__(self, handles: DeviceMemoryHandles) -> None:
        self._methods = {"auto": (False, True), "legacy": (False,), "fd": (True,)}[handles]
        # By GPU and method (True: descriptors): memory that a stub could not open; tried last.
        self._unusable: set[tuple[str, bool]] = set()
        self._logged: set[tuple[str, bool]] = set()

    def allocate(
        self,
        context: DeviceContext,
        region: int,
        size: int,
        refusals: Mapping[bool, str] = MappingProxyType({}),
    ) -> DeviceSegment:
        """Allocate at least ``size`` bytes by the first method that works.

        ``refusals``: methods by which the stub could not open memory, and why: False for handles,
        True for descriptors.

        Raises CudaError: UNAVAILABLE when the device has no memory left, INTERNAL when its context
        is lost.
        Raises BridgeError: UNSUPPORTED, with the reasons, when memory cannot be shared.
        """
        uuid = context.device.uuid
        reasons = dict(refusals)
        for by_fd in sorted(self._methods, key=lambda method: (uuid, method) in self._unusable):
            if by_fd in refusals:
                continue
            try:
                segment = DeviceSegment.allocate(context, region, size, by_fd=by_fd)
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                reasons[by_fd] = error.message
            else:
                self._log_method(uuid, by_fd, reasons.get(not by_fd))
                return segment
        missing = "; ".join(f"no {_NAMES[by_fd]}: {reasons[by_fd]}" for by_fd in self._methods)
        raise unsupported(f"memory of GPU {uuid} does not cross processes: {missing}")

    def mark_unusable(self, uuid: str, by_fd: bool) -> None:
        """Record that a stub could not open memory of a GPU by a method."""
        self._unusable.add((uuid, by_fd))

    def _log_method(self, uuid: str, by_fd: bool, refusal: str | None) -> None:
        if (uuid, by_fd) in self._logged:
            return
        self._logged.add((uuid, by_fd))
        why = "" if refusal is None else f", since {_NAMES[not by_fd]} are refused: {refusal}"
        _logger.info("memory of GPU %s crosses processes by %s%s", uuid, _NAMES[by_fd], why)


class Gpus:
    """The GPUs of this machine, probed when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probe: DeviceProbe | None = None
        self._logged_absence = False

    def probe(self) -> DeviceProbe:
        """Return the GPUs; callable on any thread. The first call probes them, which takes a while."""
        with self._lock:
            if self._probe is None:
                self._probe = probe = probe_devices()
                if probe.count:
                    _logger.info("%d GPUs found", probe.count)
                else:
                    _logger.debug("no GPU is used: %s", probe.reason)
            return self._probe

    def log_absence(self) -> None:
        """Log, once, why there is no GPU, as a model has asked for one."""
        if not self._logged_absence and not self.count():
            self._logged_absence = True
            _logger.info("no GPU is used: %s", self.probe().reason.partition(":")[0])

    def count(self) -> int:
        """Return the number of GPUs."""
        return self.probe().count

    def device(self, ordinal: int) -> DeviceInfo:
        """Return the GPU with a number; raises BridgeError."""
        devices = self.probe().devices
        if not 0 <= ordinal < len(devices):
            known = ", ".join(str(device.ordinal) for device in devices)
            known = known or f"none: {self.probe().reason}"
            raise invalid(f"expected the number of a GPU of this machine ({known}), got {ordinal}")
        return devices[ordinal]

    def by_uuid(self, uuid: str) -> DeviceInfo:
        """Return the GPU with a UUID."""
        (device,) = [each for each in self.probe().devices if each.uuid == uuid]
        return device


class DeviceManager:
    """The GPUs of this machine, and the server's contexts and memory on them.

    - ``handles``: how device memory is shared with stubs.
    - ``events``: decides where stubs wait for each other's events.

    Its attributes:

    - ``used``: whether any tensor may be on a GPU.
    - ``equipped``: whether any stub has a GPU and may allocate tensors there.
    - ``copies``: copies between GPUs and host memory.
    - ``peers``: copies between GPUs.
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
        self.gpus = Gpus()
        self._contexts: dict[str, DeviceContext] = {}
        self._streams: dict[str, CopyStream] = {}
        self._thread: AsyncDriverThread | None = None
        self.equipped = False
        self._releases = TaskSet()
        self.peers = PeerMemory(self)
        self.copies = HostCopies(self)
        self._lost = ""
        self._users: WeakSet[Instance] = WeakSet()

    # -- arenas --------------------------------------------------------------------------------

    async def prepare_stub(
        self, settings: InstanceSettings, connection: StubConnection
    ) -> StubGpu | None:
        """Return the description of its GPU for a starting stub, if it has one.

        Device memory is allocated only when needed. Raises BridgeError when the driver fails.
        """
        if settings.device is None:
            return None
        device = self.gpus.device(settings.device)
        self.equipped = True
        await self.run(partial(self.peers.probe_device, device))
        arena = StubArena(self, device, connection, settings.name)
        connection.attach_device(arena, device.uuid, self)
        return StubGpu(device.uuid, visibility(), self.arena_bytes, os.getpid())

    @property
    def used(self) -> bool:
        """Return whether any tensor may be on a GPU: the server has made memory there, or opened it."""
        return bool(self._contexts)

    def note_arena(self, segment: DeviceRegion) -> None:
        """Count a segment of a stub's arena in the metrics while it exists."""
        self._arenas.add(segment)

    def families(self) -> list[Family]:
        """Return the metrics of device arenas by GPU and sharing method, and of shared events."""
        family = Family(
            "gpubridge_device_arenas",
            "Device memory of stubs that others can open, by how it crosses processes",
            "gauge",
        )
        # By the owner in the region id, as an arena may have several segments.
        arenas = {
            (segment.uuid, "fd" if segment.fds else "legacy", segment.region >> 32)
            for segment in self._arenas
        }
        for (uuid, handles), count in Counter(each[:2] for each in arenas).items():
            family.add({"gpu_uuid": uuid, "handles": handles}, count)
        return [family, *self.events.families()]

    def region_of(self, segment: DeviceSegment) -> DeviceRegion:
        """Wrap an allocation as a region of the server."""
        return DeviceRegion(segment, self.free)

    def release_waiters(self, arena: DeviceRegion, numbers: list[int], reason: str) -> None:
        """Release the streams that wait for events of a stub that has ended.

        ``reason``: tells requests whose stub still waits some time later of that end.
        """

        async def release() -> None:
            # This closure keeps the arena alive.
            if arena.events is not None:
                await arena.events.record_for_ended_stub(self, numbers)
                self.events.await_release(arena, numbers, reason)

        self._releases.start(release())

    def free(self, segment: Closable) -> None:
        """Release unused memory or events; callable on any thread and in finalizers."""
        thread = self._thread
        # Without the thread, the server is stopping, and the memory is freed with the process.
        if thread is not None:
            thread.submit(partial(_close, segment))

    # -- the driver's thread -------------------------------------------------------------------

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on the driver thread; return its result or raise its exception.

        If the caller is cancelled, the result is dropped.
        """
        if self._thread is None:
            self._thread = AsyncDriverThread()
        thread = self._thread
        with self.noting_loss():
            return await thread.run(work)

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Record the loss of the server's GPU contexts from an error raised inside."""
        try:
            yield
        except CudaError as error:
            if error.sticky:
                self._mark_lost(error)
            raise

    def join(self, user: Instance) -> None:
        """Register a ready instance for `disable_device_exchange` when the GPU contexts are lost."""
        self._users.add(user)
        if self._lost:
            user.disable_device_exchange(self._lost)

    def _mark_lost(self, error: CudaError) -> None:
        """Make stubs send tensors in host memory, as every further driver call here fails.

        This happens when a client frees memory during a copy. Stubs have contexts of their own.
        """
        if self._lost:
            return
        self._lost = f"the server's context on its GPUs is lost: {error.message}"
        _logger.error(
            "%s; models continue and exchange tensors in host memory; clients' GPU memory is refused "
            "where the server would have to copy it",
            self._lost,
        )
        for user in tuple(self._users):
            user.disable_device_exchange(self._lost)

    def stream(self, uuid: str) -> CopyStream:
        """Return the server's stream on a GPU; call on the driver thread."""
        stream = self._streams.get(uuid)
        if stream is None:
            stream = self._streams[uuid] = CopyStream(self.context(self.gpus.by_uuid(uuid)))
        return stream

    def context(self, device: DeviceInfo) -> DeviceContext:
        """Return the server's context on a GPU; call on the driver thread."""
        context = self._contexts.get(device.uuid)
        if context is None:
            context = self._contexts[device.uuid] = DeviceContext(device)
        return context

    async def close(self) -> None:
        """Release everything, when no device memory is used any more."""
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
                _logger.warning("a GPU context or stream cannot be destroyed: %s", error.message)


def _close(segment: Closable) -> None:
    try:
        segment.close()
    except BridgeError as error:
        # The memory is freed with the process.
        _logger.warning("device memory cannot be freed: %s", error.message)
