"""Device events of tensors passed between stubs, and the failure of results when a stub dies.

A stub sends tensors that its GPU streams have yet to compute. If it dies before that, their data is
undefined, and every result computed from them, in any stub, must fail. Streams do not report this:
the server tracks which stub received which tensor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from gpubridge.engine.memory.device_region import ON_DEVICE, DeviceRegion
from gpubridge.engine.memory.region_announcer import RegionAnnouncer
from gpubridge.errors import StubDied
from gpubridge.request import InferRequest, InferResponse, MemoryRange, Outcome, PendingMemory
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.device_events import event_name, event_of, with_waits
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.engine.devices.manager import DeviceManager

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.064
_POLLS = 40
"""About two seconds of polling; memory kept longer is kept deliberately."""

S = TypeVar("S", RequestContext, ResponseContext)


class LeasePoller:
    """Polls for the end of leases that outlive their request, at first often.

    ``poll``: releases ended leases; returns whether some are left.
    """

    def __init__(self, poll: Callable[[], bool]) -> None:
        self._poll = poll
        self._pause = 0.0
        self._left = 0
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Poll again for a new lease."""
        self._left = _POLLS
        self._pause = _FIRST_PAUSE
        if self._handle is None:
            self._again()

    def close(self) -> None:
        """Stop polling."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._left = 0

    def _again(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._pause, self._on_timer)

    def _on_timer(self) -> None:
        self._handle = None
        self._left -= 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if self._poll() and self._left > 0:
            self._again()


class EdgeEvent:
    """One recording of a device event; exists while a tensor refers to it.

    - ``lease``: keeps the event from being recorded again.
    - ``pending``: the cells of its stub's control page that say which events are incomplete.
    - ``lost``: error text if it never completes; else empty.
    - ``ended``: whether its stub has ended, so that nothing may wait for it any more: no driver promises
      what becomes of a wait for an event whose recorder is gone, even if its work was complete.
    """

    __slots__ = (
        "__weakref__",
        "_dependents",
        "_pending",
        "arena",
        "ended",
        "lease",
        "lost",
        "number",
    )

    def __init__(
        self, arena: DeviceRegion, number: int, lease: object, pending: memoryview
    ) -> None:
        self.arena = arena
        self.number = number
        self.lease = lease
        self.lost = ""
        self.ended = False
        self._pending = pending
        self._dependents: WeakSet[EdgeEvent] = WeakSet()

    @property
    def name(self) -> int:
        """Return its name in control pages."""
        return event_name(self.arena.region, self.number)

    @property
    def over(self) -> bool:
        """Return whether nothing has to wait for it, whatever the driver says.

        Its stub has ended, or has seen it complete itself. If its data is undefined, ``lost`` says so.
        """
        return self.ended or not self._pending[self.number]

    def precede(self, event: EdgeEvent) -> None:
        """Record that another event depends on this one."""
        self._dependents.add(event)

    def lose(self, reason: str) -> None:
        """Mark this event and its dependents as lost."""
        losing = [self]
        while losing:
            event = losing.pop()
            if not event.lost:
                event.lost = reason
                losing += event._dependents


def awaited_by(ranges: Iterable[MemoryRange] | None) -> Iterator[EdgeEvent]:
    """Yield the events that a reader of these memory ranges must wait for."""
    for part in ranges or ():
        keep = part.keep
        while type(keep) is PendingMemory:
            yield keep.event
            keep = keep.keep


def add_event_waits(context: S, ranges: Sequence[MemoryRange], announcer: RegionAnnouncer) -> S:
    """Return a context with the events of its tensors; announces the events' arenas first."""
    waits: list[tuple[int, int] | None] = []
    for part in ranges:
        if type(part.keep) is not PendingMemory or part.keep.event.ended:
            waits.append(None)
            continue
        event = part.keep.event
        if event.arena.region not in announcer.known:
            announcer.announce(event.arena)
        waits.append((event.arena.region, event.number))
    return with_waits(context, waits)


class StubEvents:
    """The events of one stub's arena, and the events of tensors that the stub received.

    - ``uuid``: the GPU.
    - ``control``: the control page: incomplete events, and events that streams wait for.
    - ``devices``: releases streams that wait for the stub once it is dead.
    - ``release_kept``: releases memory that the stub no longer keeps; returns whether some is left.
    - ``lent``: returns the memory lent to the stub.
    - ``kill``: kills the stub, with a reason.
    """

    def __init__(  # noqa: PLR0913  (its collaborators)
        self,
        uuid: str,
        borrowed: BorrowedMemory,
        control: ControlPage,
        devices: DeviceManager,
        release_kept: Callable[[], bool],
        lent: Callable[[], Iterable[Sequence[MemoryRange]]],
        kill: Callable[[str], None],
    ) -> None:
        self.uuid = uuid
        self.kill = kill
        self._late = LeasePoller(release_kept)
        self._arena: DeviceRegion | None = None
        self._borrowed = borrowed
        self._control = control
        self._lent = lent
        self._count = 0
        self._devices = devices
        self._made: WeakSet[EdgeEvent] = WeakSet()
        # Events of responses to its calls and of completed requests: any response may depend on them.
        self._kept: WeakSet[EdgeEvent] = WeakSet()
        # Requests that were executing while lost memory was released, and why it was lost.
        self._tainted: WeakKeyDictionary[InferRequest, str] = WeakKeyDictionary()
        devices.events.join(self)

    def share(self, on: bool) -> None:
        """Make the stub share its events from now on, or wait itself before it sends."""
        self._control.events.used[0] = on

    def waits_for(self, lost: frozenset[int], since: int) -> bool | None:
        """Return whether streams of the stub wait for lost events; None if unknown ``since``.

        ``lost``: the names of the events.
        """
        looked, *awaited = self._control.events.awaited
        if not lost.isdisjoint(awaited):
            return True
        if 0 in awaited and not 0 < looked < since:
            return False
        held = {event.name for ranges in self._lent() for event in awaited_by(ranges)}
        return False if held.isdisjoint(lost) else None

    def begin(self, arena: DeviceRegion) -> None:
        """Start using the events that came with the first segment of the stub's arena, if any."""
        self._arena = arena
        self._count = 0 if arena.events is None else arena.events.count

    def unfinished(self) -> frozenset[int]:
        """Return the names of events of sent tensors that the stub has not seen complete."""
        if self._arena is None:
            return frozenset()
        region = self._arena.region
        return frozenset(event_name(region, number) for number in self._pending())

    def _pending(self) -> list[int]:
        pending = self._control.events.pending
        return [number for number in range(self._count) if pending[number]]

    def end(self, region: int) -> None:
        """Handle a closed region; the events belong to the first, and its stub may have closed them."""
        if self._arena is not None and self._arena.region == region:
            self._end_events()
            self._arena, self._count = None, 0

    def keep(self, ranges: Iterable[MemoryRange] | None) -> None:
        """Record memory that the stub keeps beyond one request."""
        self._kept.update(awaited_by(ranges))
        self._late.begin()

    def release(
        self,
        ranges: Iterable[MemoryRange] | None,
        at_stub: Callable[[], Iterable[tuple[int, int, InferRequest]]],
        started: int,
    ) -> None:
        """Record that the stub no longer keeps memory; if it was lost, fail the running requests.

        - ``at_stub``: returns batch number, ticket and request of each request at the stub.
        - ``started``: number of the batch that started last.
        """
        for event in awaited_by(ranges):
            if event.lost:
                for sequence, _, request in at_stub():
                    if sequence <= started:
                        self._tainted[request] = event.lost

    def answered(self, outcome: Outcome, record: Record, request: InferRequest) -> Outcome:
        """Return a stub's outcome, or an error if data that it may depend on is lost.

        Raises MalformedMessage when the record has an invalid event.
        """
        if not isinstance(outcome, InferResponse):
            return outcome
        if (reason := self._tainted.get(request)) is not None:
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
        """Return the inputs of a BLS call with the event that they wait for.

        ``lent``: the memory lent to the stub, on which the call may depend.
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
        made = EdgeEvent(self._arena, number, view, self._control.events.pending)
        self._made.add(made)
        for event in awaited:
            event.precede(made)
            if event.lost:
                made.lose(event.lost)
        return made

    def close(self) -> None:
        """End the events of the stub, which has ended, and release all streams that wait for them."""
        self._late.close()
        self._end_events()

    def _end_events(self) -> None:
        """Mark incomplete events as lost, then have all leased ones recorded again.

        In this order, so that dependent results fail. The driver is not asked, as it may report events
        of a dead process as complete, and a complete one as incomplete. Consumers that are told of these
        tensors later wait for nothing.
        """
        arena = self._arena
        if arena is None or arena.events is None:
            return
        numbers = set(self._pending())
        reason = arena.events.loss if numbers else arena.events.end
        for event in self._made:
            if event.number in numbers:
                event.lose(arena.events.loss)
        for event in self._made:
            event.ended = True
        numbers.update(event.number for event in self._made)
        if numbers:
            self._devices.release_waiters(arena, sorted(numbers), reason)
