"""The requests at one stub: which there are, what became of each, and the memory lent for them.

Each request enters once and leaves once: with its answer, or among those that a dead stub leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from gpubridge.engine.devices.edge_events import StubEvents
from gpubridge.engine.lent_ranges import LentRanges
from gpubridge.engine.outcome import failure_reason, outcome_of
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import HostArena
from gpubridge.request import InferRequest, MemoryRange
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.control import NO_LEASE, NOBODY_WAITS, STILL_READ, ControlPage
from gpubridge.transport.leases import BorrowedMemory, LentSlots
from gpubridge.transport.messages import Batch, ResponseFlag
from gpubridge.transport.records import Record

__all__ = ["COMES_BACK", "STILL_OPEN", "Closed", "Landed", "Ledger"]

_ANSWERED = -1
_U32 = 0xFFFF_FFFF

STILL_OPEN = "open"
"""Instead of a failure's reason: the request goes on after its batch."""

COMES_BACK = "comes back"
"""Instead of a failure's reason: the model wants to have the request again."""

Landed = tuple[Batch, list[InferRequest], dict[InferRequest, str]]
"""An answered batch, its requests, and why some of them failed, or that they are not over."""

Closed = tuple[InferRequest, str]
"""A request that went on after its batch and is over now, and why it failed, or an empty text."""

_LOOKS = 4
"""Leases of answers that are looked at for each new one: they end nearly in order."""

_NO_FAILURES: dict[InferRequest, str] = {}


class Ledger:
    """Keeps the requests at a stub by their tickets.

    Parameters
    ----------
    control : ControlPage
        Shared with the stub; stays the caller's.
    arena : HostArena
        Where the slots of requests go back to.
    borrowed : BorrowedMemory
        The stub's output memory.

    Attributes
    ----------
    events : StubEvents or None
        Those that tensors on the stub's GPU wait for.
    ranges : LentRanges
        Finds what is lent to the stub.
    """

    def __init__(self, control: ControlPage, arena: HostArena, borrowed: BorrowedMemory) -> None:
        self._control = control
        self._borrowed = borrowed
        self._lent = LentSlots(control.lent, arena)
        self.ranges = LentRanges(self._lent, arena)
        # The batches at the stub: by sequence number, each its requests by ticket.
        self._flights: dict[int, dict[int, InferRequest]] = {}
        # Requests whose batch has landed, and whose model still answers.
        self._open: dict[int, InferRequest] = {}
        # Requests that were answered while their batch still ran, and why they failed.
        self._early: dict[InferRequest, str] = {}
        self._kept: set[int] = set()
        # Tickets under which answers to the model's own calls are lent, oldest first.
        self._answers: deque[int] = deque()
        self.events: StubEvents | None = None

    @property
    def free_tickets(self) -> int:
        """How many more requests can be at the stub."""
        return self._lent.free

    @property
    def open_requests(self) -> int:
        """Requests whose batch has ended, but not they."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether no batch is at the stub."""
        return not self._flights

    def holds(self, sequence: int) -> bool:
        """Whether a batch is at the stub."""
        return sequence in self._flights

    def has_started(self, ticket: int) -> bool:
        """Whether a request is being executed, or was and is not over."""
        started = self._control.started
        return ticket in self._open or any(
            ticket in flight for sequence, flight in self._flights.items() if sequence <= started
        )

    def enter(self, sequence: int, requests: Sequence[InferRequest], owner: object) -> None:
        """Give the requests of a batch their tickets, and lend their memory."""
        flight: dict[int, InferRequest] = {}
        control = self._control
        for request in requests:
            ticket = self._lent.lend(request.slot)
            ranges = request.ranges
            if ranges is not None:
                for part in ranges:
                    if part.nbytes:
                        self._lent.keep(ticket, ranges)
                        break
                else:
                    # The stub will look at nothing, and so not say that it has.
                    control.lent[ticket] = 0
            control.cancelled[ticket] = 0
            control.passed_on[ticket] = -request.unsent & _U32
            request.ticket = ticket
            request.instance = owner
            flight[ticket] = request
        self._flights[sequence] = flight

    def cancel(self, ticket: int, running_only: bool, still_read: bool) -> int | None:
        """Note that a request is cancelled, for the stub to see.

        Returns
        -------
        int or None
            When (ns) the model began what it does, if nobody waits for any of that now; 0 where it
            may have been at any time.
        """
        started = ticket != _ANSWERED and self.has_started(ticket)
        if ticket == _ANSWERED or (running_only and not started):
            return None
        told = self._control.cancelled
        if told[ticket] != NOBODY_WAITS:
            told[ticket] = STILL_READ if still_read else NOBODY_WAITS
        executing = self._flights.get(self._control.started, {})
        members = (*self._open.values(), *executing.values())
        if not started or not all(told[each.ticket] for each in members if each.ticket >= 0):
            return None
        return 0 if self._open else self._control.started_at

    # -- answers -------------------------------------------------------------------------------

    def land(self, batch: Batch) -> Landed:
        """Give each request of an answered batch its outcome, those excepted that go on.

        Raises
        ------
        MalformedMessage
            When no such batch is at the stub, or its records are not those of its requests.
        """
        flight = self._flights.get(batch.sequence)
        records = batch.records
        if flight is None or len(flight) != len(records):
            raise MalformedMessage(f"results of batch {batch.sequence}, which is not at the stub")
        if not batch.started <= batch.called <= batch.ended:
            raise MalformedMessage(
                f"results of batch {batch.sequence}, which ended before it began"
            )
        failures, events = _NO_FAILURES, self.events
        for record in records:
            ticket = record.ticket
            request = flight.get(ticket)
            if record.word & ResponseFlag.OPEN and request is not None:
                reason = self._go_on(request, ticket)
                if reason:
                    failures = {**failures, request: reason}
                continue
            if request is None or request.ticket != ticket:
                raise MalformedMessage(f"a result for ticket {ticket}, which is not running")
            if record.word & ResponseFlag.RESCHEDULED:
                self._come_back(request, ticket)
                failures = {**failures, request: COMES_BACK}
                continue
            outcome = outcome_of(record, self._borrowed, request, self.ranges.find)
            if events is not None:
                outcome = events.answered(outcome, record, request)
            if record.word or (events is not None and isinstance(outcome, BridgeError)):
                failures = {**failures, request: failure_reason(record)}
            self._leave(request, ticket)
            request.finish(outcome)
        del self._flights[batch.sequence]
        return batch, list(flight.values()), failures

    def _go_on(self, request: InferRequest, ticket: int) -> str:
        """Note that a request outlives its batch; returns why it failed, or that it is open."""
        if request.ticket == ticket:
            if ticket in self._open:
                raise MalformedMessage(f"two results for ticket {ticket}")
            self._open[ticket] = request
            return STILL_OPEN
        if request not in self._early:
            raise MalformedMessage(f"a result for ticket {ticket}, which is not running")
        # Its last response came before its batch ended.
        self._settle(ticket)
        return self._early.pop(request)

    def _come_back(self, request: InferRequest, ticket: int) -> None:
        """Take a request back as it was sent; its model looked at copies of its inputs."""
        if ticket in self._open:
            raise MalformedMessage(f"two results for ticket {ticket}")
        self._lent.withdraw(ticket)
        request.ticket = _ANSWERED
        request.instance = None

    def respond(self, record: Record) -> Closed | None:
        """Hand on a response that a model sent by itself; returns its request if that is over now.

        Raises
        ------
        MalformedMessage
            When no such request is at the stub.
        """
        ticket = record.ticket
        request = self._open.get(ticket) or next(
            (flight[ticket] for flight in self._flights.values() if ticket in flight), None
        )
        if request is None or request.ticket != ticket:
            raise MalformedMessage(f"a response for ticket {ticket}, which is not running")
        empty = record.word & ResponseFlag.EMPTY
        outcome = None if empty else outcome_of(record, self._borrowed, request, self.ranges.find)
        if outcome is not None and self.events is not None:
            outcome = self.events.answered(outcome, record, request)
        if record.word & ResponseFlag.OPEN:
            if outcome is not None:
                request.respond(outcome)
            return None
        reason = failure_reason(record) if isinstance(outcome, BridgeError) else ""
        if self._open.pop(ticket, None) is not None:
            self._leave(request, ticket)
            request.finish(outcome)
            return request, reason
        # Its ticket stays with its batch until that has landed.
        self._early[request] = reason
        request.ticket = _ANSWERED
        request.slot = request.ranges = request.client = None
        request.finish(outcome)
        return None

    def passed_on(self, ticket: int, responses: int) -> None:
        """Tell the stub that responses of a request have left, so that it may send others."""
        if ticket != _ANSWERED:
            cells = self._control.passed_on
            cells[ticket] = (cells[ticket] + responses) & _U32

    def _leave(self, request: InferRequest, ticket: int) -> None:
        request.ticket = _ANSWERED
        self._settle(ticket)
        request.slot = request.ranges = request.client = None

    def _settle(self, ticket: int) -> None:
        if not self._lent.settle(ticket):
            self._kept.add(ticket)
            if self.events is not None:
                self.events.keep(self.ranges.of(ticket))

    def settle_kept(self) -> bool:
        """Take back the memory that models had kept and are done with; returns whether some is left."""
        for ticket in [t for t in self._kept if self._end(t)]:
            self._kept.discard(ticket)
        self._settle_answers(len(self._answers))
        return bool(self._kept or self._answers)

    def lend(self, ranges: Sequence[MemoryRange]) -> int:
        """Lend memory to the stub until its last view of it is gone; returns the ticket.

        Raises
        ------
        BridgeError
            UNAVAILABLE when there is no ticket left.
        """
        self._settle_answers(_LOOKS)
        if self._lent.exhausted:
            raise BridgeError(
                f"the model holds the memory of {len(self._answers)} answers to its calls: it must let "
                "go of some before it gets others",
                ErrorCode.UNAVAILABLE,
            )
        for part in ranges:
            if part.nbytes:
                break
        else:
            return NO_LEASE
        ticket = self._lent.lend(None)
        self._lent.keep(ticket, ranges)
        self._answers.append(ticket)
        if self.events is not None:
            self.events.keep(ranges)
        return ticket

    def called(self, ranges: list[MemoryRange], record: Record) -> list[MemoryRange]:
        """Return the inputs of a call with the event, if there is one, that they wait for.

        Raises
        ------
        MalformedMessage
            When that is none of the stub's.
        """
        if self.events is None:
            return ranges
        return self.events.called(ranges, record, map(self.ranges.of, self._lent.leases()))

    def _settle_answers(self, looks: int) -> None:
        answers = self._answers
        for _ in range(min(len(answers), looks)):
            ticket = answers.popleft()
            if not self._end(ticket):
                answers.append(ticket)

    def _end(self, ticket: int) -> bool:
        """Settle a lease that outlasts its request, or has none; returns whether it is over."""
        if self.events is None:
            return self._lent.settle(ticket)
        ranges = self.ranges.of(ticket)
        over = self._lent.settle(ticket)
        if over:
            self.events.let_go(ranges, self._left, self._control.started)
        return over

    # -- the end -------------------------------------------------------------------------------

    def close(self, started_last: int) -> tuple[list[InferRequest], list[InferRequest]]:
        """Take everything back from a stub that is dead.

        Returns
        -------
        started, unstarted : list of InferRequest
            Requests without an outcome: those whose batch had started, and the others, in order.
            The slots of the unstarted are theirs again; all other memory has been taken back.
        """
        started: list[InferRequest] = []
        unstarted: list[InferRequest] = []
        for sequence, ticket, request in self._left():
            if request.ticket == _ANSWERED:
                self._lent.recall(ticket)
            elif sequence <= started_last:
                self._lent.recall(ticket)
                request.client = None
                started.append(request)
            else:
                self._lent.withdraw(ticket)
                unstarted.append(request)
        for ticket in (*self._kept, *self._answers):
            self._lent.recall(ticket)
        events, self.events = self.events, None
        if events is not None:
            # It holds the dead stub's arena.
            events.close()
        self._answers.clear()
        self._flights.clear()
        self._open.clear()
        self._early.clear()
        self._kept.clear()
        return started, unstarted

    def _left(self) -> Iterator[tuple[int, int, InferRequest]]:
        for ticket, request in self._open.items():
            yield 0, ticket, request
        for sequence, flight in self._flights.items():
            for ticket, request in flight.items():
                # In both while its batch lands, for good if that fails half-way: a stub that lies.
                if self._open.get(ticket) is not request:
                    yield sequence, ticket, request
