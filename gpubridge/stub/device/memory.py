"""A stub's GPU: its arena, the opened memory of other processes, and the copies between them.

Slots, leases and opened regions are released only after every stream that may have used them has
completed (`DeferredFree`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence, Set as AbstractSet
from typing import TYPE_CHECKING, Callable, NamedTuple

from gpubridge.cuda_ipc import (
    CopyCounts,
    CopyMark,
    CopyStream,
    CudaError,
    DeviceContext,
    DeviceInfo,
    DeviceSlot,
    EventLease,
    StagedCopies,
    find_device,
)
from gpubridge.cuda_ipc.driver import OUT_OF_MEMORY
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.device.deferred_free import (
    DeferredFree,
    DeviceLease,
    Uploads,
    view_of_adjacent,
)
from gpubridge.stub.device.events import EdgeEvents, streams_behind
from gpubridge.stub.device.own_arena import OwnArena
from gpubridge.stub.device.pinning import HostPinning
from gpubridge.stub.device.regions import DeviceRegions, OpenedRegion
from gpubridge.stub.device.transfers import CopyStreams, OrderingStream, Transfers
from gpubridge.stub.device.waker import Waker
from gpubridge.tensor.device_bytes import DeviceBytes, Ready

if TYPE_CHECKING:
    from gpubridge.stub.bls.calls import ControlRequest
    from gpubridge.transport.control import EventCells
    from gpubridge.transport.leases import BorrowedMemory
    from gpubridge.transport.stub_settings import StubGpu

_ALLOCATION_SECONDS = 2.0
"""Time that an allocation waits for free space in the arena."""
_POLL_SECONDS = 0.001
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


def show_work(counts: CopyCounts, words: memoryview) -> None:
    """Write bytes by kind, copies by kind, and waits, as `gpubridge.telemetry.statistics` reads them."""
    for index, number in enumerate(
        (*counts.copied.values(), *counts.copies.values(), counts.waits)
    ):
        words[index] = number


class _Resources(NamedTuple):
    """Context and streams of a device, created on first use."""

    ordinal: int
    context: DeviceContext
    streams: CopyStreams
    uploads: Uploads
    deferred: DeferredFree
    staged: StagedCopies


class StubDevice:
    """The GPU of a stub's model; its CUDA context is created on first use.

    - ``gpu``: the server's description.
    - ``owner``: the upper half of the ids of this stub's regions.
    - ``work``: counters that the server reads: bytes by kind, copies by kind, waits.
    - ``cells``: the shared cells of the events between stubs.
    - ``ask``: sends a request to the server (`BlsClient.ask`).
    - ``notify_closed``: tells the server that a region is closed (`DeviceRegions`).
    - ``notify_unusable``: tells the server to send this stub no device memory.

    Its attributes:

    - ``regions``: all device memory that is open here.
    - ``events``: the events by which streams of different stubs wait for each other.
    - ``pinning``: pins host memory, once the context exists.
    - ``shared``: whether tensors in the arena may be given to other models on the device.
    - ``lost``: the error after which the device no longer works in this process.
    - ``waker``: wakes the main thread, see `reclaim_until`.
    """

    def __init__(  # noqa: PLR0913  (the interface between both processes)
        self,
        gpu: StubGpu,
        owner: int,
        work: memoryview,
        cells: EventCells,
        ask: Callable[..., ControlRequest],
        notify_closed: Callable[[int, int], None],
        notify_unusable: Callable[[], None],
        fall_back: Callable[..., None],
    ) -> None:
        self.uuid = gpu.uuid
        self._work = work
        self._notify_unusable = notify_unusable
        self._fall_back = fall_back
        self.lost: CudaError | None = None
        self.waker = Waker()
        self.shared = True
        self._absence: BridgeError | None = None
        self._lacks_memory = False
        self._full_reported = False
        # Any thread may use it first; any may reclaim.
        self._creating = threading.Lock()
        self._reclaiming = threading.Lock()
        self._resources: _Resources | None = None
        self.pinning = HostPinning(fall_back)
        self.regions = DeviceRegions(lambda: self._require().context, owner, notify_closed)
        private = "the model runs in its server's process" if gpu.server == os.getpid() else ""
        self._arena = OwnArena(gpu.limit, self.regions, ask, private, self._become_private)
        self.events = EdgeEvents(
            self._arena, self.regions, self._event_stream, cells, fall_back, self.waker.wake
        )
        #: Takes back slots that the server has released; set by the lender.
        self.reclaim_slots: Callable[[], object] = lambda: None
        #: Releases slots of prefetched inputs; set by the prefetcher.
        self.evict_prefetched: Callable[[], None] = lambda: None
        self._is_used = False
        self._notify_used: Callable[[], object] = lambda: None
        if private:
            notify_unusable()

    def _require(self) -> _Resources:
        """Return the device's resources, created now if need be; may raise BridgeError."""
        resources = self._resources
        if resources is None:
            self.use()
            with self._creating:
                resources = self._resources or self._create_resources()
                self._resources = resources
        return resources

    def on_use(self, notify: Callable[[], None]) -> None:
        """Call something before memory of requests or responses may be on the device."""
        self._notify_used = notify
        if self._is_used:
            notify()

    def use(self) -> None:
        """Note that memory of requests or responses may be on the device from now on."""
        first, self._is_used = not self._is_used, True
        self._notify_used()
        if first:
            self.waker.wake(always=True)

    def _create_resources(self) -> _Resources:
        if self._absence is not None:
            raise self._absence
        device: DeviceInfo | None = None
        try:
            device = find_device(self.uuid)
            return self._create_on(device)
        except BridgeError as error:
            if isinstance(error, CudaError) and error.status == OUT_OF_MEMORY:
                self._report_shortage(error)
            elif device is None:
                # Without a driver, or hidden by it: that does not change in this process.
                self._absence = error
                text = f"tensors stay in host memory, since the GPU cannot be used: {error.message}"
                self._fall_back("device_absent", text)
                self._notify_unusable()
            raise

    def _create_on(self, device: DeviceInfo) -> _Resources:
        with contextlib.ExitStack() as undo:
            context = DeviceContext(device)
            undo.callback(context.close)
            streams = CopyStreams(context)
            undo.callback(streams.close)
            free_stream = CopyStream(context, streams.counts)
            undo.callback(free_stream.close)
            uploads = Uploads(CopyStream(context, streams.counts))
            undo.pop_all()
        deferred = DeferredFree(free_stream, self._arena.free, self.waker.wake)
        # Pinning begins once, so nothing may fail after this.
        self.pinning.begin(context)
        staged = StagedCopies(context)
        return _Resources(device.ordinal, context, streams, uploads, deferred, staged)

    def _report_shortage(self, error: CudaError) -> None:
        """Have no tensors sent here on the GPU any more, whether or not some memory is free next time."""
        if self._lacks_memory:
            return
        self._lacks_memory = True
        text = (
            "tensors of other models come in host memory until the stub is started again, since the GPU "
            f"had no memory for its context: {error.message}"
        )
        self._fall_back("device_memory_full", text)
        self._notify_unusable()

    @property
    def ordinal(self) -> int:
        """The device's number in this process."""
        return self._require().ordinal

    @property
    def stream(self) -> OrderingStream:
        """A stream that is ordered with a tensor imported from a library."""
        resources = self._require()
        return OrderingStream(resources.streams, resources.deferred.stream)

    @property
    def uploads(self) -> Uploads:
        """The copies of inputs to the device."""
        return self._require().uploads

    @property
    def first_region(self) -> OpenedRegion:
        """The first segment of the arena."""
        return self._arena.first()

    @property
    def shares_arena(self) -> bool:
        """Return whether others may use tensors in the arena; allocates it to find out."""
        if self.shared:
            try:
                self._arena.first()
            except BridgeError as error:
                self.report_full(error)
                return False
        return self.shared

    def report_full(self, error: BridgeError) -> None:
        """Report that a tensor crosses in host memory as the device is full; re-raise other errors."""
        if error.code is not ErrorCode.UNAVAILABLE:
            raise error
        text = (
            f"tensors leave the GPU between models while it has no memory for them: {error.message}"
        )
        level = Logger.VERBOSE if self._full_reported else Logger.WARNING
        self._full_reported = True
        self._fall_back("device_memory_full", text, int(level))

    @property
    def capacity(self) -> int:
        """Limit of the arena's bytes."""
        return self._arena.limit

    def add_lease_book(self, book: BorrowedMemory) -> None:
        """Let a lease book resolve references into the arena."""
        self._arena.lease_books.append(book)

    def _become_private(self, reason: str) -> None:
        if self.shared:
            self.stop_sharing(reason)
            self._notify_unusable()

    def stop_sharing(self, reason: str) -> None:
        """Give no more tensors on the device to others; those already given stay valid."""
        if self.shared:
            self.shared = False
            text = f"tensors leave the GPU between models: {reason}"
            self._fall_back("device_not_shared", text)

    def find_in_arena(self, data: DeviceBytes) -> tuple[int, int] | None:
        """Return region and offset of bytes in the arena; None if they are elsewhere."""
        return self._arena.find(data.pointer, data.nbytes)

    def borrowed(
        self, ref: Sequence[int], view: memoryview, ready: Ready | None
    ) -> DeviceBytes | None:
        """Return bytes lent to this stub as long as ``view`` exists; None if on the host."""
        opened = self.regions.get(ref[0])
        if opened is None:
            return None
        if not ref[2]:
            # An empty tensor: the reference only names its device.
            return DeviceBytes(0, 0, self.ordinal)
        pointer = opened.pointer
        lease = self.lease((view, opened))
        return DeviceBytes(
            pointer + ref[1],
            ref[2],
            self.ordinal,
            lease,
            ready,
            read_only=opened.client or view.readonly,
            streams=lease.streams,
        )

    def lease(self, memory: object) -> DeviceLease:
        """Keep memory for tensors until all streams that used them have passed."""
        return self._require().deferred.lease(memory)

    def allocate_device(self, nbytes: int, *, wait: bool = True) -> DeviceBytes:
        """Return undefined bytes in the arena; with ``wait``, waits a while for free space."""
        self._require()
        slot = self._slot(nbytes) if wait else self._arena.allocate(nbytes)
        lease = self.lease(slot)
        return DeviceBytes(slot.pointer, nbytes, self.ordinal, lease, streams=lease.streams)

    def _slot(self, nbytes: int) -> DeviceSlot:
        slot = self._arena.try_allocate(nbytes)
        refusal: BridgeError | None = None
        deadline = time.monotonic() + _ALLOCATION_SECONDS
        while slot is None:
            # Unreferenced memory is reclaimed before the arena grows.
            self.reclaim_slots()
            self.reclaim()
            slot = self._arena.try_allocate(nbytes)
            if slot is not None:
                break
            try:
                if refusal is None and self._arena.grow(nbytes):
                    slot = self._arena.try_allocate(nbytes)
                    continue
            except BridgeError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                # The device is full, but slots of the arena may still be released.
                refusal = error.with_traceback(None)
            if nbytes > self.capacity or time.monotonic() >= deadline:
                raise refusal or self._arena.full_error(nbytes)
            self.evict_prefetched()
            time.sleep(_POLL_SECONDS)
        return slot

    def transfers(self) -> Transfers:
        """Return transfers for one response, or one copy of the model, on a separate stream."""
        return Transfers(self._require().streams, self)

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Start to copy host memory into the arena; it is kept until that is done."""
        copies = self.transfers()
        data = copies.upload(memory)
        data.ready = copies.detach()
        return data

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        """Fill a writable buffer of exactly ``data.nbytes``, in order; it is full on return."""
        self.copy_all_to_host([(data, target)])

    def copy_all_to_host(self, copies: Sequence[tuple[DeviceBytes, memoryview]]) -> None:
        """Fill buffers, pinned or not, as `copy_to_host`, with one wait for the streams."""
        self.finish(self.transfers(), copies)

    def finish(
        self, transfers: Transfers, copies: Sequence[tuple[DeviceBytes, memoryview]]
    ) -> None:
        """Finish transfers, then fill host buffers, pinned or not."""
        for data, _ in copies:
            transfers.order(data)
            transfers.stream.count_copy("d2h", data.nbytes)
        transfers.finish()
        if copies:
            self._require().staged.to_host([(data.pointer, target) for data, target in copies])

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        """Return a copy of bytes in the arena, in order; its `ready` tells when it is complete."""
        return self._copies([(data,)])[0]

    def join(self, parts: Sequence[DeviceBytes]) -> DeviceBytes:
        """Return bytes one after another: a view where they lie so, else a copy in the arena."""
        return view_of_adjacent(parts) or self._copies([parts])[0]

    def copies_on_device(self, given: Sequence[DeviceBytes]) -> list[DeviceBytes]:
        """Return copies in the arena, as `copy_on_device` does."""
        return self._copies([(data,) for data in given])

    def _copies(self, given: Sequence[Sequence[DeviceBytes]]) -> list[DeviceBytes]:
        if not given:
            return []
        transfers = self.transfers()
        try:
            copies = [transfers.copy(*parts) for parts in given]
        finally:
            mark = transfers.detach()
        for copy in copies:
            copy.ready = mark
        return copies

    def record_event(self, given: Sequence[DeviceBytes], copies: Transfers) -> EventLease | None:
        """Record the event for which other stubs wait before they use some bytes.

        Returns None if the bytes are complete; without a free event, this waits until they are.
        """
        streams = streams_behind(given, copies)
        if not streams:
            return None
        event = self.events.record(streams, copies, self.reclaim_slots)
        if event is None:
            copies.finish()
        return event

    def _event_stream(self) -> CopyStream:
        return self._require().deferred.stream

    def keep_until(self, mark: CopyMark, memory: object) -> None:
        """Keep memory until a mark has passed."""
        self._require().deferred.add(memory, mark, {})

    def collect(self, stream: CopyStream, behind: AbstractSet[int]) -> list[object]:
        """Return unreferenced memory that only these streams use; see `DeferredFree.collect`."""
        resources = self._require()
        with self._reclaiming, self._defer_errors():
            return resources.deferred.collect(stream, behind)
        return []

    def release_collected(self, collected: list[object]) -> None:
        """Release collected memory, after its stream was waited for."""
        resources = self._require()
        with self._reclaiming, self._defer_errors():
            resources.deferred.release_collected(collected)
            self._sweep(resources)

    def reclaim(self) -> None:
        """Release unreferenced memory that no stream uses any more, without waiting."""
        resources = self._resources
        if resources is None:
            return
        with self._reclaiming, self._defer_errors():
            resources.deferred.reclaim()
            self.events.sweep()
            self._sweep(resources)

    @contextlib.contextmanager
    def _defer_errors(self) -> Iterator[None]:
        """Leave memory queued until the next call after an error, unless the device is lost."""
        try:
            yield
        except BridgeError as error:
            self.note_error(error)
            if self.lost is not None:
                raise

    def _sweep(self, resources: _Resources) -> None:
        resources.uploads.sweep()
        show_work(resources.streams.counts, self._work)

    def reclaim_until(
        self, arrives: Callable[[float | None, int | None], bool]
    ) -> CudaError | None:
        """Reclaim until a message arrives; return ``lost``, at once when the device is.

        Otherwise a client could not unregister its memory before the next request, and a failure of
        work that other stubs wait for would not be noticed. ``arrives`` is `Channel.wait`. While nothing
        is pending this sleeps; threads of the model wake it (`Waker`).
        """
        waker, pause = self.waker, _FIRST_PAUSE
        while True:
            waker.armed = True
            waker.armed = idle = not self.busy
            if self.lost is not None:
                break
            if idle:
                if arrives(None, waker.descriptor):
                    break
                waker.clear()
                pause = _FIRST_PAUSE
                continue
            if arrives(pause, None):
                break
            with contextlib.suppress(CudaError):
                self.reclaim()
            pause = min(2 * pause, _LONGEST_PAUSE)
        waker.armed = False
        return self.lost

    @property
    def busy(self) -> bool:
        """Return whether streams may still use unreferenced memory, or write tensors of others."""
        resources = self._resources
        return resources is not None and (
            resources.deferred.pending or resources.uploads.busy or self.events.pending
        )

    def check(self) -> None:
        """Query the device, on which the model may have failed; an error is noted."""
        try:
            if self._resources is not None:
                self._resources.deferred.stream.done()
        except CudaError as error:
            self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """Note an error after which the process has to end."""
        if isinstance(error, CudaError) and error.sticky:
            self.lost = error
            self.waker.wake()

    def close(self) -> None:
        """Complete the work that others wait for, and unpin and close memory; the model is finalized."""
        resources = self._resources
        try:
            if resources is not None:
                self.events.finish()
                resources.uploads.close()
                resources.staged.close()
        finally:
            self.pinning.close()
            self.regions.close()
