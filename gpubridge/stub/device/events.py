"""Events that order tensors between the stubs of a GPU, so that no thread waits.

The producer records an event behind its tensors; the consumer orders each stream that uses them after
the event. A thread waits only if there are no events, or none is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Callable

from gpubridge.cuda_ipc import CopyStream, EventLease, EventRing, SharedEvents
from gpubridge.errors import BridgeError, ErrorCode, InternalError
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.device.event_waits import EventWaits
from gpubridge.stub.device.regions import DeviceRegions
from gpubridge.stub.device.transfers import Transfers
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.tensor.streams import ANY_STREAM
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.control import EventCells
from gpubridge.transport.device_events import event_name, waits_of

if TYPE_CHECKING:
    from gpubridge.stub.device.own_arena import OwnArena


class AwaitedEvent:
    """An event that completes bytes of another stub (`gpubridge.tensor.device_bytes.Ready`).

    Keeps the opened event; its lease lasts as long as the bytes are in use.
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
        """Order later work of a stream after the bytes are complete.

        If the stream is captured, this waits: a graph cannot wait for work outside it.
        """
        if self._copies.captured(stream):
            if not self.done():
                self.wait()
            return
        if stream in self._ordered:
            # Already published; but the handle may be that of a newer stream by now.
            self._events.order(self._number, stream)
            return
        self._ordered.add(stream)
        self._waits.order(self._name, self._events, self._number, stream, self._copies)

    def done(self) -> bool:
        """Return whether the bytes are complete."""
        return self._events.done(self._number)

    def wait(self) -> None:
        """Wait until the bytes are complete; counted."""
        self._copies.count_wait()
        with self._waits.by_thread(self._name):
            stub = f"the stub of another model (arena {self._name >> 32})"
            self._events.wait(self._number, stub)


class EdgeEvents:
    """The events of a stub's own arena, and those of other stubs that it waits for.

    ``event_stream`` returns the stream that makes marks; ``wake`` is called after each record. In ``cells`` the server says whether events are
    used, and sees which events are pending and which are waited for.
    """

    def __init__(
        self,
        arena: OwnArena,
        regions: DeviceRegions,
        event_stream: Callable[[], CopyStream],
        cells: EventCells,
        fall_back: Callable[..., None],
        wake: Callable[[], None],
    ) -> None:
        self._wake = wake
        self._arena = arena
        self._regions = regions
        self._event_stream = event_stream
        self._fall_back = fall_back
        # The server makes them with the first segment of the arena.
        self._begun = False
        self._own: SharedEvents | None = None
        self._ring: EventRing | None = None
        # Not known to be complete, about in the order of recording.
        self._recorded: deque[int] = deque()
        self._cells = cells
        self._pending = cells.pending
        self._waits = EventWaits(cells)
        self._recording = threading.Lock()
        self._reported = False

    def _begin(self) -> None:
        try:
            own = self._arena.first().events
        except BridgeError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            # There is no memory for them now: the caller waits.
            return
        with self._recording:
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
        self, streams: set[int], copies: Transfers, reclaim_slots: Callable[[], object]
    ) -> EventLease | None:
        """Record an event behind at least one stream; calls ``reclaim_slots`` if no event is free.

        Returns None without an event: the stream of ``copies`` is then ordered behind the others.
        """
        if not self._begun:
            self._begin()
        lease = None
        if self._ring is not None and self._cells.used[0]:
            if not self._ring.free():
                reclaim_slots()
            lease = self._lease(self._ring, streams, copies)
            if lease is None:
                self._report_exhausted()
        if lease is None:
            _join(streams, copies)
        return lease

    def _lease(self, ring: EventRing, streams: set[int], copies: Transfers) -> EventLease | None:
        # A single stream needs no join.
        single = len(streams) == 1 and ANY_STREAM not in streams
        (stream,) = streams if single else (_join(streams, copies),)
        record = partial(ring.record, stream, self._forget)
        lease = self._event_stream().record_uncaptured(stream, record, self._query)
        if lease is not None:
            with self._recording:
                self._pending[lease.number] = 1
                self._recorded.append(lease.number)
            self._wake()
        return lease

    def _forget(self, number: int) -> None:
        """Forget an event's last record, which all consumers have passed.

        A capture may take the next record: then `sweep` must not query the event.
        """
        with self._recording:
            if number in self._recorded:
                self._recorded.remove(number)
                self._pending[number] = 0

    def _query(self, lease: EventLease | None) -> None:
        if lease is not None and self._own is not None:
            self._own.done(lease.number)

    def _report_exhausted(self) -> None:
        text = "all events are in use, so that a tensor for another model on the GPU is waited for"
        self._fall_back(
            "device_events_in_use", text, int(Logger.VERBOSE if self._reported else Logger.INFO)
        )
        self._reported = True

    @property
    def pending(self) -> bool:
        """Return whether tensors given to other stubs may be incomplete."""
        return bool(self._recorded)

    def sweep(self) -> None:
        """Update which events are complete; CudaError if one never will be."""
        self._waits.sweep()
        own = self._own
        if own is None or not self._recorded:
            return
        with self._recording:
            while self._recorded and own.done(self._recorded[0]):
                self._pending[self._recorded.popleft()] = 0

    def finish(self) -> None:
        """Wait until all tensors given to other stubs are complete, before the process ends."""
        while self._own is not None and self._recorded:
            self._own.wait(self._recorded[0], "this stub")
            self.sweep()

    def awaited(
        self, context: RequestContext | ResponseContext, count: int
    ) -> Sequence[AwaitedEvent | None]:
        """Return the event that completes each tensor of a record; InternalError if not open here."""
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
        return AwaitedEvent(opened.events, number, self._event_stream(), name, self._waits)


def _join(streams: set[int], copies: Transfers) -> int:
    joined = copies.stream
    for stream in streams - {joined.handle}:
        joined.order_after(stream)
    return joined.handle


def streams_behind(kept: Sequence[DeviceBytes], copies: Transfers) -> set[int]:
    """Return the streams that complete some bytes; the stream of ``copies`` waits for other marks."""
    streams: set[int] = set()
    for data in kept:
        streams.update(data.streams)
        if data.ready is not None:
            if data.ready is not copies.stream:
                data.ready.order_before(copies.stream.handle)
            streams.add(copies.stream.handle)
    return streams
