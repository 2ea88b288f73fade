"""A stub's GPU: its arena, the memory of others that it has opened, and the copies between them.

Nothing goes back before every stream that may have used it has passed: slots to the arena, leases to
their lenders, opened memory to the driver. What nobody looks at any more is *over* (`OverMemory`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence, Set as AbstractSet
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from gpubridge.cuda_ipc import (
    CopyCounts,
    CopyMark,
    CopyStream,
    CudaError,
    DeviceContext,
    DeviceSlot,
    EventLease,
    StagedCopies,
    find_device,
)
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.device.events import EdgeEvents, streams_behind
from gpubridge.stub.device.over import DeviceHold, OverMemory, Uploads
from gpubridge.stub.device.own_arena import OwnArena
from gpubridge.stub.device.pinning import HostPinning
from gpubridge.stub.device.regions import DeviceRegions, OpenedRegion
from gpubridge.stub.device.transfers import CopyStreams, OrderingStream, Transfers
from gpubridge.tensor.device_bytes import DeviceBytes, Ready

if TYPE_CHECKING:
    from gpubridge.stub.questions import Question
    from gpubridge.transport.control import EventCells
    from gpubridge.transport.leases import BorrowedMemory

_PATIENCE = 2.0
"""Seconds that an output waits for room in the arena."""
_LOOK = 0.001
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


def show_work(counts: CopyCounts, words: memoryview) -> None:
    """Write bytes by kind, copies by kind, and waits, as `gpubridge.telemetry.statistics` reads them."""
    for index, number in enumerate(
        (*counts.copied.values(), *counts.copies.values(), counts.waits)
    ):
        words[index] = number


class _Parts(NamedTuple):
    """Context and streams of a device, made at first need."""

    ordinal: int
    context: DeviceContext
    streams: CopyStreams
    uploads: Uploads
    over: OverMemory
    staged: StagedCopies


class StubDevice:
    """The GPU that a stub's model is on: nothing of CUDA is made here before somebody needs it.

    - ``told``: what the server says of it: ``uuid``; ``ordinal``, its number there; ``limit``, the
      bytes of this stub's arena; ``server``, the process.
    - ``owner``: the upper half of the ids of this stub's regions.
    - ``work``: where the server sees what was done: bytes by kind, copies by kind, waits.
    - ``cells``: those by which stubs wait for each other.
    - ``ask``: asks the server (`BlsClient.ask`).
    - ``tell_closed``: tells it of a region that is closed (`DeviceRegions`).
    - ``tell_none``: tells it to hand this stub no memory of the device.

    Its attributes:

    - ``regions``: all memory that is open here.
    - ``events``: those by which streams of different stubs wait for each other.
    - ``pinning``: of host memory; begins with the rest.
    - ``shared``: whether others on the device may be handed what is in the arena.
    - ``lost``: why nothing of the device works any more in this process.
    """

    def __init__(  # noqa: PLR0913  (the two processes' words)
        self,
        told: dict[str, Any],
        owner: int,
        work: memoryview,
        cells: EventCells,
        ask: Callable[..., Question],
        tell_closed: Callable[[int, int], None],
        tell_none: Callable[[], None],
        fall_back: Callable[..., None],
    ) -> None:
        self.uuid: str = told["uuid"]
        self._work = work
        self._tell_none = tell_none
        self._fall_back = fall_back
        self.lost: CudaError | None = None
        self.shared = True
        self._absent: BridgeError | None = None
        self._full_said = False
        # Any thread may be the first to need it; any may settle.
        self._making = threading.Lock()
        self._settling = threading.Lock()
        self._parts: _Parts | None = None
        self.pinning = HostPinning(fall_back)
        self.regions = DeviceRegions(lambda: self._needed().context, owner, tell_closed)
        alone = "the model runs in its server's process" if told["server"] == os.getpid() else ""
        self._arena = OwnArena(told["limit"], self.regions, ask, alone, self._stay_alone)
        self.events = EdgeEvents(self._arena, self.regions, self._marking, cells, fall_back)
        #: Takes back slots that the server is done with; set by who lends them.
        self.reclaim: Callable[[], object] = _nothing
        #: Lets go of slots that are filled ahead of their time; set by who does that.
        self.make_room: Callable[[], None] = _nothing
        if alone:
            tell_none()

    def _needed(self) -> _Parts:
        """Return what is there of the device, made now if it is not; BridgeError if that cannot be."""
        parts = self._parts
        if parts is None:
            with self._making:
                parts = self._parts or self._make()
                self._parts = parts
        return parts

    def _make(self) -> _Parts:
        if self._absent is not None:
            raise self._absent
        try:
            device = find_device(self.uuid)
        except BridgeError as error:
            # There is no driver here, or it does not show the GPU: nor will it.
            self._absent = error
            text = f"tensors stay in host memory, since the GPU cannot be used: {error.message}"
            self._fall_back("device_absent", text)
            self._tell_none()
            raise
        with contextlib.ExitStack() as undo:
            context = DeviceContext(device)
            undo.callback(context.close)
            streams = CopyStreams(context)
            undo.callback(streams.close)
            after = CopyStream(context, streams.counts)
            undo.callback(after.close)
            uploads = Uploads(CopyStream(context, streams.counts))
            undo.pop_all()
        over = OverMemory(after, self._arena.free)
        # It begins once, so nothing may fail behind it.
        self.pinning.begin(context)
        return _Parts(device.ordinal, context, streams, uploads, over, StagedCopies(context))

    @property
    def needed(self) -> bool:
        """Return whether anybody has needed it by now."""
        return self._parts is not None

    @property
    def ordinal(self) -> int:
        """The device's number in this process."""
        return self._needed().ordinal

    @property
    def stream(self) -> OrderingStream:
        """A stream that waits for a tensor that a library brings."""
        parts = self._needed()
        return OrderingStream(parts.streams, parts.over.stream)

    @property
    def uploads(self) -> Uploads:
        """The copies of inputs to the device."""
        return self._needed().uploads

    @property
    def own(self) -> OpenedRegion:
        """The first segment of the arena."""
        return self._arena.first()

    @property
    def hands_on(self) -> bool:
        """Return whether others may be handed what is in the arena, which is made to find that out."""
        if self.shared:
            try:
                self._arena.first()
            except BridgeError as error:
                self.note_full(error)
                return False
        return self.shared

    def note_full(self, error: BridgeError) -> None:
        """Say that a tensor crosses in host memory as the device is full; raises another error."""
        if error.code is not ErrorCode.UNAVAILABLE:
            raise error
        text = (
            f"tensors leave the GPU between models while it has no memory for them: {error.message}"
        )
        level = Logger.VERBOSE if self._full_said else Logger.WARNING
        self._full_said = True
        self._fall_back("device_memory_full", text, int(level))

    @property
    def capacity(self) -> int:
        """Bytes that the arena may come to have."""
        return self._arena.limit

    def know_own_in(self, book: BorrowedMemory) -> None:
        """Have views made of what lies in the arena, too."""
        self._arena.books.append(book)

    def _stay_alone(self, reason: str) -> None:
        if self.shared:
            self.keep_alone(reason)
            self._tell_none()

    def keep_alone(self, reason: str) -> None:
        """Hand on no more tensors on the device; those that others have stay theirs."""
        if self.shared:
            self.shared = False
            text = f"tensors leave the GPU between models: {reason}"
            self._fall_back("device_not_shared", text)

    def place_in_arena(self, data: DeviceBytes) -> tuple[int, int] | None:
        """Return region and offset of bytes in the arena; None for those that lie elsewhere."""
        return self._arena.place(data.pointer, data.nbytes)

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
        pointer = opened.pointer
        hold = self.hold((view, opened))
        return DeviceBytes(
            pointer + ref[1],
            ref[2],
            self.ordinal,
            hold,
            ready,
            read_only=opened.client or view.readonly,
            streams=hold.streams,
        )

    def hold(self, kept: object) -> DeviceHold:
        """Hold something for tensors, until all streams that used them have passed."""
        return self._needed().over.hold(kept)

    def allocate_device(self, nbytes: int, *, patient: bool = True) -> DeviceBytes:
        """Return undefined bytes in the arena; waits some time for room if ``patient``."""
        hold = self._needed().over.hold
        slot = self._slot(nbytes) if patient else self._arena.allocate(nbytes)
        held = hold(slot)
        return DeviceBytes(slot.pointer, nbytes, self.ordinal, held, streams=held.streams)

    def _slot(self, nbytes: int) -> DeviceSlot:
        slot = self._arena.take(nbytes)
        refusal: BridgeError | None = None
        deadline = time.monotonic() + _PATIENCE
        while slot is None:
            # What is over already is taken before the arena grows.
            self.reclaim()
            self.settle()
            slot = self._arena.take(nbytes)
            if slot is not None:
                break
            try:
                if refusal is None and self._arena.grow(nbytes):
                    slot = self._arena.take(nbytes)
                    continue
            except BridgeError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                # The device is full: others may give back what they have of the arena.
                refusal = error.with_traceback(None)
            if nbytes > self.capacity or time.monotonic() >= deadline:
                raise refusal or self._arena.no_room(nbytes)
            self.make_room()
            time.sleep(_LOOK)
        return slot

    def transfers(self) -> Transfers:
        """Return what copies for one response, or for the model, on a stream of its own."""
        return Transfers(self._needed().streams, self)

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Begin to copy host memory into the arena; it stays held until that is done."""
        copies = self.transfers()
        data = copies.upload(memory)
        data.ready = copies.leave()
        return data

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        """Fill a writable buffer of exactly ``data.nbytes``, in order; it is full on return."""
        self.copy_all_to_host([(data, target)])

    def copy_all_to_host(self, copies: Sequence[tuple[DeviceBytes, memoryview]]) -> None:
        """Fill buffers, which need not be pinned, as `copy_to_host`; with one wait for the streams."""
        self.finish(self.transfers(), copies)

    def finish(
        self, transfers: Transfers, copies: Sequence[tuple[DeviceBytes, memoryview]]
    ) -> None:
        """Finish transfers, then fill buffers of the host, which need not be pinned."""
        for data, _ in copies:
            transfers.order(data)
            transfers.stream.count_copy("d2h", data.nbytes)
        transfers.finish()
        if copies:
            self._needed().staged.to_host([(data.pointer, target) for data, target in copies])

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        """Return a copy in the arena, in order; its `ready` tells when it is made."""
        return self.copies_on_device([data])[0]

    def copies_on_device(self, given: Sequence[DeviceBytes]) -> list[DeviceBytes]:
        """Return copies in the arena, as `copy_on_device` does."""
        if not given:
            return []
        transfers = self.transfers()
        try:
            copies = [transfers.copy(data) for data in given]
        finally:
            mark = transfers.leave()
        for copy in copies:
            copy.ready = mark
        return copies

    def hand_over(self, kept: Sequence[DeviceBytes], copies: Transfers) -> EventLease | None:
        """Let another stub's streams wait, by the event returned, for what is written to bytes.

        None where there is nothing to wait for; where there was no event, this has waited.
        """
        streams = streams_behind(kept, copies)
        if not streams:
            return None
        event = self.events.record(streams, copies, self.reclaim)
        if event is None:
            copies.finish()
        return event

    def _marking(self) -> CopyStream:
        return self._needed().over.stream

    def keep_until(self, mark: CopyMark, kept: object) -> None:
        """Hold something until a mark has passed."""
        self._needed().over.add(kept, mark)

    def collect(self, stream: CopyStream, behind: AbstractSet[int]) -> list[object]:
        """Return what is over and used by no other streams than these; see `OverMemory`."""
        parts = self._needed()
        with self._settling, self._later():
            return parts.over.collect(stream, behind)
        return []

    def passed(self, over: list[object]) -> None:
        """Give back what was collected, the stream having been waited for."""
        parts = self._needed()
        with self._settling, self._later():
            parts.over.passed(over)
            self._sweep(parts)

    def settle(self) -> None:
        """Give back what is over and no stream uses any more; nothing is waited for."""
        parts = self._parts
        if parts is None:
            return
        with self._settling, self._later():
            parts.over.settle()
            self.events.sweep()
            self._sweep(parts)

    @contextlib.contextmanager
    def _later(self) -> Iterator[None]:
        """Leave memory where it is until somebody settles again, unless the device is lost."""
        try:
            yield
        except BridgeError as error:
            self.note(error)
            if self.lost is not None:
                raise

    def _sweep(self, parts: _Parts) -> None:
        parts.uploads.sweep()
        show_work(parts.streams.counts, self._work)

    def settle_until(self, arrives: Callable[[float], bool]) -> CudaError | None:
        """Give back memory as its streams pass, until ``arrives`` sees a message or all is back.

        Else a client could not unregister its memory before the next request. And work may fail
        that others wait for, of which nobody else is told: returns why nothing of the device works
        any more.
        """
        pause = _FIRST_PAUSE
        while self.lost is None and self.busy and not arrives(pause):
            with contextlib.suppress(CudaError):
                self.settle()
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.lost

    @property
    def busy(self) -> bool:
        """Return whether streams may still use unreferenced memory, or write what was handed on."""
        parts = self._parts
        return parts is not None and (
            parts.over.left or parts.uploads.busy or self.events.unfinished
        )

    def check(self) -> None:
        """Find out whether the device still works here: a model may have failed on it."""
        try:
            if self._parts is not None:
                self._parts.over.stream.done()
        except CudaError as error:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Note that the process has to end, if that follows from an error."""
        if isinstance(error, CudaError) and error.sticky:
            self.lost = error

    def close(self) -> None:
        """The model is finalized: complete what others wait for, let go of what the driver minds."""
        parts = self._parts
        try:
            if parts is not None:
                self.events.finish()
                parts.uploads.close()
                parts.staged.close()
        finally:
            self.pinning.close()
            self.regions.close()


def _nothing() -> None:
    pass
