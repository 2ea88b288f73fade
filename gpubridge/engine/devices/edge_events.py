"""The events that tensors between stubs wait for, and who depends on them should a stub die.

A stub hands on what its streams are still to compute. When it dies before they have, nobody's data
comes; so whatever was made of that, by whichever stub, must not be taken for an answer. Streams say
nothing of it: the server knows who was handed what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from gpubridge.engine.announcements import Announcements
from gpubridge.engine.devices.region import ON_DEVICE, DeviceRegion
from gpubridge.errors import StubDied
from gpubridge.request import InferRequest, InferResponse, MemoryRange, Outcome, PendingMemory
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.device_events import event_name, event_of, with_waits
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.engine.devices.memory import DeviceMemory

_FIRST_LOOK = 0.001
_LONGEST_LOOK = 0.064
_LOOKS = 40
"""About two seconds; whoever keeps memory longer than that keeps it on purpose."""

S = TypeVar("S", RequestContext, ResponseContext)


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

    @property
    def name(self) -> int:
        """Its name in control pages."""
        return event_name(self.arena.region, self.number)

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

    - ``uuid``: the GPU.
    - ``control``: says which of its events are not seen to be done, and what its streams wait for.
    - ``devices``: lets streams go that wait for the stub, when it is dead.
    - ``settle``: takes back memory that the stub is done with after its request; returns whether
      some is left.
    - ``lent``: returns what the stub is lent.
    - ``kill``: ends the stub, and says why.
    """

    def __init__(  # noqa: PLR0913  (what it stands between)
        self,
        uuid: str,
        borrowed: BorrowedMemory,
        control: ControlPage,
        devices: DeviceMemory,
        settle: Callable[[], bool],
        lent: Callable[[], Iterable[Sequence[MemoryRange]]],
        kill: Callable[[str], None],
    ) -> None:
        self.uuid = uuid
        self.kill = kill
        self._late = LateLeases(settle)
        self._arena: DeviceRegion | None = None
        self._borrowed = borrowed
        self._control = control
        self._lent = lent
        self._count = 0
        self._devices = devices
        self._made: WeakSet[EdgeEvent] = WeakSet()
        # Of answers to its calls, and of requests that are over: any response may come of them.
        self._kept: WeakSet[EdgeEvent] = WeakSet()
        # What was executed while lost memory went back, and why it was lost.
        self._doomed: WeakKeyDictionary[InferRequest, str] = WeakKeyDictionary()
        devices.events.join(self)

    def share(self, on: bool) -> None:
        """Have the stub use its events from now on, or wait itself."""
        self._control.events.used[0] = on

    def waits_for(self, lost: frozenset[int], since: int) -> bool | None:
        """Return whether streams of the stub wait for events; None if it has not looked ``since``.

        ``lost``: the events, by their names.
        """
        looked, *awaited = self._control.events.awaited
        if not lost.isdisjoint(awaited):
            return True
        if 0 in awaited and not 0 < looked < since:
            return False
        held = {event.name for ranges in self._lent() for event in awaited_by(ranges)}
        return False if held.isdisjoint(lost) else None

    def begin(self, arena: DeviceRegion) -> None:
        """The stub has events from now on, if they came with the first segment of its arena."""
        self._arena = arena
        self._count = 0 if arena.events is None else arena.events.count

    def unfinished(self) -> frozenset[int]:
        """Return the events, by their names, of what the stub has handed on and has not seen done."""
        if self._arena is None:
            return frozenset()
        region = self._arena.region
        return frozenset(event_name(region, number) for number in self._pending())

    def _pending(self) -> list[int]:
        pending = self._control.events.pending
        return [number for number in range(self._count) if pending[number]]

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
        numbers = self._pending()
        if numbers and self._arena is not None and self._arena.events is not None:
            for event in self._made:
                if event.number in numbers:
                    event.lose(self._arena.events.loss)
            self._devices.release_waiters(self._arena, numbers)
