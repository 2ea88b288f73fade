"""A stub's GPU: its arena, the memory of others that it has opened, and the copies between them.

Nothing goes back before every stream that may have used it has passed: slots to the arena, leases to
their lenders, opened memory to the driver. What nobody looks at any more is *over* (`OverMemory`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Callable

from gpubridge.cuda_ipc import (
    CopyStream,
    CudaError,
    DeviceArena,
    DeviceContext,
    DeviceSlot,
    EventLease,
    find_device,
)
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.stub.device.events import EdgeEvents, streams_behind
from gpubridge.stub.device.over import DeviceHold, OverMemory, Uploads, precede
from gpubridge.stub.device.pinning import HostPinning
from gpubridge.stub.device.regions import ArenaOffers, DeviceRegions
from gpubridge.tensor.device_bytes import DeviceBytes, Ready

_PATIENCE = 2.0
"""Seconds that an output waits for room in the arena."""
_LOOK = 0.001
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


def show_work(streams: Sequence[CopyStream], words: memoryview) -> None:
    """Write bytes by kind, copies by kind, and waits, as `gpubridge.telemetry.statistics` reads them."""
    kinds = streams[0].copied
    for index, kind in enumerate(kinds):
        words[index] = sum(stream.copied[kind] for stream in streams)
        words[index + len(kinds)] = sum(stream.copies[kind] for stream in streams)
    words[2 * len(kinds)] = sum(stream.waits for stream in streams)


class StubDevice:
    """The GPU that a stub's model is on; current in the thread that makes this object.

    - ``work``: where the server sees what was done: bytes by kind, copies by kind, waits.
    - ``stream``: where all copies are made, those of `uploads` excepted.
    - ``own``: the arena.
    - ``regions``: all memory that is open here.
    - ``events``: those by which streams of different stubs wait for each other.
    - ``shared``: whether others on the device can have the arena open.
    - ``lost``: why nothing of the device works any more in this process.
    """

    def __init__(
        self,
        offers: ArenaOffers,
        work: memoryview,
        pending: memoryview,
        tell_closed: Callable[[int, int], None],
        fall_back: Callable[..., None],
    ) -> None:
        self._work = work
        assert offers.fields is not None
        info = find_device(offers.fields["uuid"])
        self.uuid = info.uuid
        self.ordinal = info.ordinal
        self._context = DeviceContext(info)
        self._context.make_current()
        self.stream = CopyStream(self._context)
        self.uploads = Uploads(self._context)
        self.pinning = HostPinning(self._context, fall_back)
        self.lost: CudaError | None = None
        # Any thread may settle.
        self._settling = threading.Lock()
        self.regions = DeviceRegions(self._context, offers, tell_closed)
        self.own = self.regions.own
        self.shared = True
        self._fall_back = fall_back
        if self.regions.reason:
            self.keep_alone(self.regions.reason)
        self.events = EdgeEvents(self.regions, self.stream, pending, fall_back)
        self._arena = DeviceArena(self.own.segment)
        self._over = OverMemory(self.stream, self._arena.free)
        #: Takes back slots that the server is done with; set by who lends them.
        self.reclaim: Callable[[], object] = _nothing
        #: Lets go of slots that are filled ahead of their time; set by who does that.
        self.make_room: Callable[[], None] = _nothing

    def keep_alone(self, reason: str) -> None:
        """Hand on no more tensors on the device; those that others have stay theirs."""
        if self.shared:
            self.shared = False
            text = f"tensors leave the GPU between models: {reason}"
            self._fall_back("device_not_shared", text)

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self.own.size

    def pointer_in_arena(self, data: DeviceBytes) -> int | None:
        """Return the offset of bytes in the arena; None for those that lie elsewhere."""
        offset = data.pointer - self.own.pointer
        return offset if offset >= 0 and offset + data.nbytes <= self.own.size else None

    def borrowed(
        self, ref: Sequence[int], view: memoryview, ready: Ready | None
    ) -> DeviceBytes | None:
        """Return bytes that are lent to this stub while ``view`` lives; None if on the host."""
        opened = self.regions.get(ref[0])
        if opened is None:
            return None
        if not ref[2]:
            # It says no more than on which device the tensor is.
            return DeviceBytes(0, 0, self.ordinal)
        hold = self._over.hold((view, opened))
        return DeviceBytes(
            opened.pointer + ref[1],
            ref[2],
            self.ordinal,
            hold,
            ready,
            read_only=opened.client or view.readonly,
            streams=hold.streams,
        )

    def hold(self, kept: object) -> DeviceHold:
        """Hold something for tensors, until all streams that used them have passed."""
        return self._over.hold(kept)

    def allocate_device(self, nbytes: int, *, patient: bool = True) -> DeviceBytes:
        """Return undefined bytes in the arena; waits some time for room if ``patient``."""
        slot = self._slot(nbytes) if patient else self._arena.allocate(nbytes)
        hold = self._over.hold(slot)
        return DeviceBytes(slot.pointer, nbytes, self.ordinal, hold, streams=hold.streams)

    def _slot(self, nbytes: int) -> DeviceSlot:
        deadline = 0.0
        while True:
            try:
                return self._arena.allocate(nbytes)
            except BridgeError as error:
                if error.code is not ErrorCode.UNAVAILABLE or nbytes > self.own.size:
                    raise
                now = time.monotonic()
                deadline = deadline or now + _PATIENCE
                if now >= deadline:
                    raise
            self.reclaim()
            self.make_room()
            self.settle()
            time.sleep(_LOOK)

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Begin to copy host memory into the arena; it stays held until that is done."""
        data = self.allocate_device(memory.nbytes)
        self.load(memory, data.pointer)
        self._over.add(memory)
        data.ready = self.stream
        return data

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        """Fill a writable buffer of exactly ``data.nbytes``, in order; it is full on return."""
        self.read(data, target)
        self.finish()

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        """Return a copy in the arena, in order; its `ready` tells when it is made."""
        copy = self.allocate_device(data.nbytes)
        self.write(data, copy.pointer)
        if data.owner_streams is not None:
            # Its library may use the memory again before the copy is made: as the model does with a
            # buffer of its own for each request, and the library's allocator with what is let go of.
            for stream in data.owner_streams:
                precede(self.stream, stream)
            self._over.add(data.owner)
        copy.ready = self.stream
        return copy

    def read(self, data: DeviceBytes, target: memoryview) -> None:
        """Begin to copy bytes of the device to the host, in order."""
        data.order_into(self.stream)
        self.stream.d2h(target, data.pointer, data.nbytes)
        self._over.begun()

    def write(self, data: DeviceBytes, pointer: int) -> None:
        """Begin to copy bytes of the device to another place there, in order."""
        data.order_into(self.stream)
        self.stream.d2d(pointer, data.pointer, data.nbytes)
        self._over.begun()

    def load(self, memory: memoryview, pointer: int) -> None:
        """Begin to copy host memory to a place of the device; it must stay until :meth:`finish`."""
        self.stream.h2d(pointer, memory, memory.nbytes)
        self._over.begun()

    def hand_over(self, kept: Sequence[DeviceBytes]) -> EventLease | None:
        """Let another stub's streams wait, by the event returned, for what is written to bytes.

        None where there is nothing to wait for; where there was no event, this has waited.
        """
        streams = streams_behind(kept, self.stream)
        if not streams:
            return None
        event = self.events.record(streams, self.reclaim)
        self._over.begun()
        if event is None:
            self.finish()
        return event

    def order(self, data: DeviceBytes) -> None:
        """Let :meth:`finish` wait for all that is written to bytes by now."""
        data.order_into(self.stream)
        self._over.begun()

    def finish(self) -> None:
        """Wait once for all that was begun; what is over then goes back. CudaError if it failed."""
        with self._settling:
            over = self._over.collect()
            queued = self._over.queued
        self.stream.wait()
        with self._settling:
            self._over.waited(over, queued)
            self.uploads.sweep()
            show_work((self.stream, self.uploads.stream), self._work)

    def settle(self) -> None:
        """Give back what is over and no stream uses any more; nothing is waited for."""
        with self._settling:
            self._over.settle()
            self.uploads.sweep()
            self.events.sweep()
            self.regions.close_unused()
            show_work((self.stream, self.uploads.stream), self._work)

    def settle_until(self, arrives: Callable[[float], bool]) -> CudaError | None:
        """Give back memory as its streams pass, until ``arrives`` sees a message or all is back.

        Else a client could not unregister its memory before the next request. And work may fail
        that others wait for, of which nobody else is told: returns why nothing of the device works
        any more.
        """
        pause = _FIRST_PAUSE
        while self.lost is None and self.busy and not arrives(pause):
            try:
                self.settle()
            except BridgeError as error:
                self.note(error)
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.lost

    @property
    def busy(self) -> bool:
        """Return whether streams may still use unreferenced memory, or write what was handed on."""
        return self._over.left or self.uploads.busy or self.events.unfinished

    def check(self) -> None:
        """Find out whether the device still works here: a model may have failed on it."""
        try:
            self.stream.done()
        except CudaError as error:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Note that the process has to end, if that follows from an error."""
        if isinstance(error, CudaError) and error.sticky:
            self.lost = error

    def close(self) -> None:
        """The model is finalized: complete what others wait for, let go of what the driver minds."""
        try:
            self.events.finish()
            self.uploads.close()
        finally:
            self.pinning.close()


def _nothing() -> None:
    pass
