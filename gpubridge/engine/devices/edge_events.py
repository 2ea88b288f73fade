"""The events that tensors between stubs wait for, and who depends on them should a stub die.

A stub hands on what its streams are still to compute. When it dies before they have, nobody's data
comes; so whatever was made of that, by whichever stub, must not be taken for an answer. Streams say
nothing of it: the server knows who was handed what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

from gpubridge.engine.announcements import Announcements
from gpubridge.engine.devices.region import ON_DEVICE, DeviceRegion
from gpubridge.errors import StubDied
from gpubridge.request import InferRequest, InferResponse, MemoryRange, Outcome, PendingMemory
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.device_events import event_of, with_waits
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

_FIRST_LOOK = 0.001
_LONGEST_LOOK = 0.064
_LOOKS = 40
"""About two seconds; whoever keeps memory longer than that keeps it on purpose."""

S = TypeVar("S", RequestContext, ResponseContext)
ReleaseWaiters = Callable[[DeviceRegion, list[int]], None]
"""`DeviceMemory.release_waiters`."""


class LateLeases:
    """Looks whether they are over, at first often: others wait for that memory.

    ``look``: takes back what is; returns whether some is left.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._pause = 0.0
        self._left = 0
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is one more."""
        self._left = _LOOKS
        self._pause = _FIRST_LOOK
        if self._handle is None:
            self._again()

    def close(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._left = 0

    def _again(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._pause, self._take)

    def _take(self) -> None:
        self._handle = None
        self._left -= 1
        self._pause = min(2 * self._pause, _LONGEST_LOOK)
        if self._look() and self._left > 0:
            self._again()


class EdgeEvent:
    """One recording of an event: it lives as long as somebody may wait for it.

    - ``lease``: keeps it from being recorded again.
    - ``lost``: why it never came to pass; empty if it has, or may.
    """

    __slots__ = ("__weakref__", "_dependents", "arena", "lease", "lost", "number")

    def __init__(self, arena: DeviceRegion, number: int, lease: object) -> None:
        self.arena = arena
        self.number = number
        self.lease = lease
        self.lost = ""
        self._dependents: WeakSet[EdgeEvent] = WeakSet()

    def precede(self, event: EdgeEvent) -> None:
        """Note that another event comes of this one."""
        self._dependents.add(event)

    def lose(self, reason: str) -> None:
        """It will never come to pass, nor what comes of it."""
        losing = [self]
        while losing:
            event = losing.pop()
            if not event.lost:
                event.lost = reason
                losing += event._dependents


def awaited_by(ranges: Iterable[MemoryRange] | None) -> Iterator[EdgeEvent]:
    """Find the events that somebody waits for who looks at memory."""
    for part in ranges or ():
        keep = part.keep
        while type(keep) is PendingMemory:
            yield keep.event
            keep = keep.keep


def tell_waits(context: S, ranges: Sequence[MemoryRange], announcements: Announcements) -> S:
    """Return the context of a record for a stub on a GPU, which is told of the events' arenas first."""
    waits: list[tuple[int, int] | None] = []
    for part in ranges:
        if type(part.keep) is not PendingMemory:
            waits.append(None)
            continue
        event = part.keep.event
        if event.arena.region not in announcements.known:
            announcements.tell(event.arena)
        waits.append((event.arena.region, event.number))
    return with_waits(context, waits)


class StubEvents:
    """The events of one stub's arena, once it has one, and those that it was handed.

    - ``pending``: where the stub says which of its events are not seen to be done.
    - ``release_waiters``: lets streams go that wait for the stub, when it is dead.
    - ``settle``: takes back memory that the stub is done with after its request; returns whether
      some is left.
    """

    def __init__(
        self,
        borrowed: BorrowedMemory,
        pending: memoryview,
        release_waiters: ReleaseWaiters,
        settle: Callable[[], bool],
    ) -> None:
        self._late = LateLeases(settle)
        self._arena: DeviceRegion | None = None
        self._borrowed = borrowed
        self._pending = pending
        self._count = 0
        self._release_waiters = release_waiters
        self._made: WeakSet[EdgeEvent] = WeakSet()
        # Of answers to its calls, and of requests that are over: any response may come of them.
        self._kept: WeakSet[EdgeEvent] = WeakSet()
        # What was executed while lost memory went back, and why it was lost.
        self._doomed: WeakKeyDictionary[InferRequest, str] = WeakKeyDictionary()

    def begin(self, arena: DeviceRegion) -> None:
        """The stub has events from now on, if they came with the first segment of its arena."""
        self._arena = arena
        self._count = 0 if arena.events is None else arena.events.count

    def end(self, region: int) -> None:
        """The stub has given a region back; if that was the first, it has no events."""
        if self._arena is not None and self._arena.region == region:
            self._arena, self._count = None, 0

    def keep(self, ranges: Iterable[MemoryRange] | None) -> None:
        """The stub looks at memory that it was not handed for one request alone."""
        self._kept.update(awaited_by(ranges))
        self._late.begin()

    def let_go(
        self,
        ranges: Iterable[MemoryRange] | None,
        at_stub: Callable[[], Iterable[tuple[int, int, InferRequest]]],
        started: int,
    ) -> None:
        """The stub looks at memory no more; if that was lost, what it executes now may come of it.

        - ``at_stub``: gives the requests at the stub, each behind the number of its batch and its
          ticket.
        - ``started``: the batch that has started last.
        """
        for event in awaited_by(ranges):
            if event.lost:
                for sequence, _, request in at_stub():
                    if sequence <= started:
                        self._doomed[request] = event.lost

    def answered(self, outcome: Outcome, record: Record, request: InferRequest) -> Outcome:
        """Return what a stub's response comes to: an error, if what it was made of is lost.

        Raises MalformedMessage when it names an event that is none.
        """
        if not isinstance(outcome, InferResponse):
            return outcome
        if (reason := self._doomed.get(request)) is not None:
            return StubDied(reason)
        awaited = {*awaited_by(request.ranges), *self._kept}
        for event in awaited:
            if event.lost:
                return StubDied(event.lost)
        outcome.event = self._record(record, awaited)
        return outcome

    def called(
        self, ranges: list[MemoryRange], record: Record, lent: Iterable[Sequence[MemoryRange]]
    ) -> list[MemoryRange]:
        """Return the inputs of a call, with the event that they wait for.

        ``lent``: whatever the stub was lent: its calls may come of that.
        """
        awaited = {event for each in lent for event in awaited_by(each)}
        made = self._record(record, awaited)
        if made is None:
            return ranges
        return [
            part._replace(keep=PendingMemory(part.keep, made))
            if isinstance(part.segment, ON_DEVICE)
            else part
            for part in ranges
        ]

    def _record(self, record: Record, awaited: Iterable[EdgeEvent]) -> EdgeEvent | None:
        named = event_of(record.context, self._count)
        if named is None or self._arena is None:
            return None
        number, lease = named
        (view,) = self._borrowed.views([(self._arena.region, 0, 0, lease)])
        made = EdgeEvent(self._arena, number, view)
        self._made.add(made)
        for event in awaited:
            event.precede(made)
            if event.lost:
                made.lose(event.lost)
        return made

    def close(self) -> None:
        """The stub is gone: what it has not seen to be done counts as lost.

        Whoever waits for that is let go after it was said: what comes of it is lost, too. The driver is
        not asked, as it may let events pass of a process that it has ended.
        """
        self._late.close()
        numbers = [number for number in range(self._count) if self._pending[number]]
        if numbers and self._arena is not None and self._arena.events is not None:
            for event in self._made:
                if self._pending[event.number]:
                    event.lose(self._arena.events.loss)
            self._release_waiters(self._arena, numbers)
