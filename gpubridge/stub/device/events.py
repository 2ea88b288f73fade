"""Events that order tensors handed to other stubs of a GPU, so that no thread waits.

The producer records an event of its own behind them; the consumer has each stream that is to use
them wait for it. A thread waits only where there are no events, or none is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from gpubridge.cuda_ipc import CopyStream, EventLease, EventRing, SharedEvents
from gpubridge.errors import BridgeError, ErrorCode, InternalError
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.device.event_waits import EventWaits
from gpubridge.stub.device.regions import DeviceRegions
from gpubridge.stub.device.transfers import Transfers
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.control import EventCells
from gpubridge.transport.device_events import event_name, waits_of

if TYPE_CHECKING:
    from gpubridge.stub.device.own_arena import OwnArena


class AwaitedEvent:
    """Tells when bytes of another stub are complete (`gpubridge.tensor.device_bytes.Ready`).

    Holds what keeps the event, and nothing of its lease: that lasts as long as the bytes are looked at.
    """

    __slots__ = ("_copies", "_events", "_name", "_number", "_ordered", "_waits")

    def __init__(
        self,
        events: SharedEvents,
        number: int,
        copies: CopyStream,
        name: int,
        waits: EventWaits,
    ) -> None:
        self._events = events
        self._number = number
        self._copies = copies
        self._name = name
        self._waits = waits
        self._ordered: set[int] = set()

    def order_before(self, stream: int, /) -> None:
        """Let what is submitted to a stream from now on wait until the bytes are complete.

        Where that is captured, this waits: a graph cannot wait for what is not of it.
        """
        if self._copies.captured(stream):
            if not self.done():
                self.wait()
            return
        if stream in self._ordered:
            # The server has been shown it; a stream of another one's may have the handle by now.
            self._events.order(self._number, stream)
            return
        self._ordered.add(stream)
        self._waits.order(self._name, self._events, self._number, stream, self._copies)

    def done(self) -> bool:
        """Tell whether the bytes are complete."""
        return self._events.done(self._number)

    def wait(self) -> None:
        """Return when the bytes are complete; counted."""
        self._copies.count_wait()
        with self._waits.by_thread(self._name):
            self._events.wait(self._number)


class EdgeEvents:
    """The events of a stub's own arena, and those that it waits for.

    ``marking`` gives the stream by whose events others are marked. ``cells`` show the server which events are not seen to be done, and which are waited for; it says
    there whether events are used.
    """

    def __init__(
        self,
        arena: OwnArena,
        regions: DeviceRegions,
        marking: Callable[[], CopyStream],
        cells: EventCells,
        fall_back: Callable[..., None],
    ) -> None:
        self._arena = arena
        self._regions = regions
        self._marking = marking
        self._fall_back = fall_back
        # They come with the first segment of the arena.
        self._begun = False
        self._own: SharedEvents | None = None
        self._ring: EventRing | None = None
        # Not seen to be done yet, in the order in which they were recorded.
        self._recorded: deque[int] = deque()
        self._cells = cells
        self._pending = cells.pending
        self._waits = EventWaits(cells)
        self._noting = threading.Lock()
        self._said = False

    def _begin(self) -> None:
        try:
            own = self._arena.first().events
        except BridgeError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            # There is no memory for them now: this waits.
            return
        with self._noting:
            if self._begun:
                return
            self._begun = True
            self._own = own
            self._ring = None if own is None else EventRing(own)
        if own is None and self._regions.no_events:
            text = (
                "tensors that other models get on the GPU are waited for: "
                f"{self._regions.no_events}"
            )
            self._fall_back("device_events_not_shared", text)

    def record(
        self, streams: set[int], copies: Transfers, reclaim: Callable[[], object]
    ) -> EventLease | None:
        """Record an event behind at least one stream; ``reclaim`` is asked where none is free.

        Returns: None where there is none: the stream of ``copies`` is behind them then.
        """
        if not self._begun:
            self._begin()
        lease = None
        if self._ring is not None and self._cells.used[0]:
            if not self._ring.free():
                reclaim()
            lease = self._lease(self._ring, streams, copies)
            if lease is None:
                self._say_exhausted()
        if lease is None:
            _join(streams, copies)
        return lease

    def _lease(self, ring: EventRing, streams: set[int], copies: Transfers) -> EventLease | None:
        # Of one stream no other has to know.
        (stream,) = streams if len(streams) == 1 else (_join(streams, copies),)
        self._marking().outlast(stream)
        with self._noting:
            lease = ring.record(stream)
            if lease is not None:
                self._pending[lease.number] = 1
                self._recorded.append(lease.number)
        return lease

    def _say_exhausted(self) -> None:
        text = "all events are in use, so that a tensor for another model on the GPU is waited for"
        self._fall_back(
            "device_events_in_use", text, int(Logger.VERBOSE if self._said else Logger.INFO)
        )
        self._said = True

    @property
    def unfinished(self) -> bool:
        """Return whether what was handed on may be incomplete."""
        return bool(self._recorded)

    def sweep(self) -> None:
        """Look what of it is complete; CudaError where it never will be."""
        self._waits.sweep()
        own = self._own
        if own is None or not self._recorded:
            return
        with self._noting:
            while self._recorded and own.done(self._recorded[0]):
                self._pending[self._recorded.popleft()] = 0

    def finish(self) -> None:
        """Wait until all that was handed on is complete: the process is about to end."""
        while self._own is not None and self._recorded:
            self._own.wait(self._recorded[0])
            self.sweep()

    def awaited(
        self, context: RequestContext | ResponseContext, count: int
    ) -> Sequence[AwaitedEvent | None]:
        """Return what each tensor of a record waits for; InternalError for events not open here."""
        waits = waits_of(context)
        if waits is None:
            return [None] * count
        made: dict[tuple[int, int], AwaitedEvent] = {}
        found = []
        for wait in waits:
            if wait is not None and wait not in made:
                made[wait] = self._await(*wait)
            found.append(None if wait is None else made[wait])
        return found

    def _await(self, region: int, number: int) -> AwaitedEvent:
        opened = self._regions.get(region)
        if opened is None or opened.events is None:
            raise InternalError(
                "expected to have the events open that a tensor of another model on the GPU waits "
                f"for, got none: {self._regions.no_events or 'their memory is closed'}"
            )
        name = event_name(region, number)
        return AwaitedEvent(opened.events, number, self._marking(), name, self._waits)


def _join(streams: set[int], copies: Transfers) -> int:
    joined = copies.stream
    for stream in streams - {joined.handle}:
        joined.order_after(stream)
    return joined.handle


def streams_behind(kept: Sequence[DeviceBytes], copies: Transfers) -> set[int]:
    """Return the streams on which bytes become complete, that of ``copies`` standing for what else is."""
    streams: set[int] = set()
    for data in kept:
        streams.update(data.streams)
        if data.ready is not None:
            if data.ready is not copies.stream:
                data.ready.order_before(copies.stream.handle)
            streams.add(copies.stream.handle)
    return streams
