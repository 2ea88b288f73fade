"""Base of both sequence batchers: slots of sequences, their backlog and their end."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence as Series

from gpubridge.engine.scheduling.policy import Refusal
from gpubridge.engine.scheduling.sequence_admission import Admission
from gpubridge.engine.scheduling.sequence_item import (
    ControlPlan,
    Place,
    Sequence,
    SequenceItem,
    SequenceTimers,
)
from gpubridge.engine.scheduling.sequence_settings import SequenceBatching
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.control import TICKETS

_QUEUED = Place.QUEUED
_TAKEN = Place.TAKEN
_GONE = Place.GONE


class SequenceScheduler(ABC):
    """Keeps the requests of a sequence in order and on one instance.

    A sequence takes the free slot with the lowest number, on whichever instance, and keeps it from
    its START until its END is answered, until it was idle for too long, until one of its queued
    requests is cancelled, or until its instance dies. While there is no slot it waits with all
    its requests in the backlog. What follows an early end is refused until the next START.

    - ``max_batch_size``: 0 for a model without batch dimension.
    - ``slots``: sequences per instance.
    """

    wants_answers = True

    def __init__(
        self, settings: SequenceBatching, model: str, max_batch_size: int, slots: int
    ) -> None:
        self._slots = slots
        self._controls = ControlPlan(settings.controls, max_batch_size > 0)
        self._admission = Admission(model, self._controls, settings.iterative)
        self._known: dict[int | str, Sequence] = {}
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._seats: dict[int, list[Sequence | None]] = {}
        self._free: list[tuple[int, int]] = []
        self._timers = SequenceTimers(settings.max_sequence_idle_us * 1000)
        self._refused: list[Refusal] = []
        self._queued = 0

    # -- what comes in -------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Return the number of items it holds, with those that `refused` is about to return."""
        return self._queued + len(self._refused)

    def add(self, item: SequenceItem, now_ns: int) -> None:
        """Take a request over.

        Raises BridgeError: ``INVALID_ARG``: it has more than one element, no correlation id or one
        that the model cannot get, or it does not start a sequence and belongs to none.
        ``UNAVAILABLE``: it starts a sequence after `stop`.
        """
        self._age(now_ns)
        self._admission.check(item, self._known)
        sequence = self._known.get(item.correlation_id)
        if sequence is None:
            sequence = self._known[item.correlation_id] = Sequence(item.correlation_id)
            self._backlog[sequence] = None
        elif item.start:
            self._admission.warn_of_conflict(item)
        item.arrived = now_ns
        item.place = _QUEUED
        item.sequence = sequence
        sequence.queue.append(item)
        self._queued += 1
        if item.end:
            sequence.complete = True
            del self._known[item.correlation_id]
        if sequence.instance < 0:
            if item.timeout_us:
                deadline = now_ns + item.timeout_us * 1000
                sequence.deadline = min(sequence.deadline or deadline, deadline)
            self._fill()
            self._timers.watch(sequence)
        else:
            self._offer(sequence)

    # -- what goes out -------------------------------------------------------------------------

    @abstractmethod
    def take(self, instance: int, now_ns: int, most: int = TICKETS) -> list[SequenceItem] | None:
        """Give away the next batch of an instance if it is due, with control tensors and slots.

        None of it where it is due, but has to wait: ``most`` items may be given away.
        """

    def _hand_out(self, item: SequenceItem) -> None:
        """Make the first item of its sequence ready to be executed."""
        sequence = _of(item)
        sequence.queue.popleft()
        item.instance, item.slot = sequence.instance, sequence.slot
        sequence.in_flight += 1
        self._queued -= 1
        item.place = _TAKEN
        item.controls = self._controls.of_request(
            item.correlation_id, start=item.start, end=item.end
        )

    def next_wakeup(self, now_ns: int) -> int | None:
        """Return when a batch becomes due or a sequence is over by the mere passing of time."""
        if self._refused:
            return now_ns
        times = [*self._batch_times(now_ns), *filter(None, [self._timers.next()])]
        return max(min(times), now_ns) if times else None

    def refused(self, now_ns: int) -> list[Refusal]:
        """Give away what will not be executed: its sequence is over, by time, cancel or death."""
        self._age(now_ns)
        refused, self._refused = self._refused, []
        return refused

    def _age(self, now_ns: int) -> None:
        for sequence in self._timers.due(now_ns):
            if sequence in self._backlog:
                self._refuse(
                    sequence.queue,
                    "timeout of the corresponding sequence has been expired",
                    ErrorCode.UNAVAILABLE,
                )
            self._end(sequence)

    def _refuse(self, items: Iterable[SequenceItem], text: str, code: ErrorCode) -> None:
        """Give items up that are in a queue; who calls takes them out of it."""
        for item in items:
            self._withdraw(item)
            item.place = _GONE
            self._queued -= 1
            self._refused.append((item, BridgeError(text, code)))

    def clear(self) -> list[SequenceItem]:
        """Give everything away and end every sequence."""
        items = [item for item, _ in self._refused]
        self._refused = []
        seated = [seat for seats in self._seats.values() for seat in seats if seat is not None]
        for sequence in [*self._backlog, *seated]:
            for item in sequence.queue:
                self._withdraw(item)
                item.place = _GONE
                items.append(item)
            sequence.queue.clear()
        self._queued = 0
        # The backlog first, or ending the others would seat it.
        for sequence in [*self._backlog, *seated]:
            self._break_off(sequence)
        return items

    # -- what comes back -----------------------------------------------------------------------

    def answered(self, item: SequenceItem, now_ns: int) -> list[SequenceItem]:
        """Hear that a taken item has its outcome; return the items whose outcomes may go out now.

        Padding may be reported or not.
        """
        sequence = item.sequence
        if sequence is None or item.place is not _TAKEN:
            return []
        item.place = _GONE
        if not sequence.closed:
            self._landed(sequence)
            if sequence.busy:
                self._offer(sequence)
            elif sequence.complete or sequence.broken or self._admission.iterative:
                self._end(sequence)
            else:
                sequence.idle_since = now_ns
                self._timers.watch(sequence)
        return self._in_order(item, now_ns)

    def reschedule(self, item: SequenceItem, now_ns: int) -> None:
        """Have a taken item executed again, as the next request of its sequence.

        Raises BridgeError: ``INVALID_ARG``: the model has no ``iterative_sequence``, or the
        sequence is over. The item is still to be reported by `answered`.
        """
        if not self._admission.iterative:
            raise self._admission.not_iterative()
        sequence = _of(item)
        if sequence.closed or sequence.broken:
            raise self._admission.not_started(item)
        self._landed(sequence)
        item.start = item.end = False
        item.arrived = now_ns
        item.place = _QUEUED
        # Before what the client sent later: that comes when this request has its answer.
        sequence.queue.appendleft(item)
        self._queued += 1
        self._offer(sequence)

    def put_back(self, items: Series[SequenceItem]) -> None:
        """Take back what was never started; it is again the first of its sequence."""
        restored = []
        for item in reversed(items):
            sequence = item.sequence
            if sequence is None or item.place is not _TAKEN:
                continue
            item.place = _QUEUED
            self._queued += 1
            if sequence.closed:
                self._refuse([item], self._admission.broken_off(sequence), ErrorCode.UNAVAILABLE)
                continue
            self._landed(sequence)
            if sequence.broken:
                self._refuse([item], self._admission.broken_off(sequence), ErrorCode.CANCELLED)
                self._end(sequence)
                continue
            sequence.queue.appendleft(item)
            restored.append(item)
        self._restore(restored[::-1])

    def cancel(self, item: SequenceItem) -> bool:
        """Give an item away if it was not taken yet, and end its sequence.

        A sequence never goes on with a gap: its other queued items come out of `refused`.
        """
        sequence = item.sequence
        if sequence is None or item.place is not _QUEUED:
            return False
        self._withdraw(item)
        sequence.queue.remove(item)
        item.place = _GONE
        self._queued -= 1
        self._refuse(sequence.queue, self._admission.broken_off(sequence), ErrorCode.CANCELLED)
        sequence.queue.clear()
        self._break_off(sequence)
        return True

    def releasable(self) -> list[SequenceItem]:
        """Return what else may go out since the last call of `answered`."""
        return []

    # -- instances -----------------------------------------------------------------------------

    def instance_up(self, instance: int) -> None:
        """Open the slots of an instance."""
        if instance not in self._seats:
            self._seats[instance] = [None] * self._slots
            for slot in range(self._slots):
                heapq.heappush(self._free, (slot, instance))
            self._instance_added(instance)
            self._fill()

    def instance_died(self, instance: int, _now_ns: int) -> None:
        """Close the slots of an instance and end the sequences that lived there.

        What they had queued is refused, up to the first START: from there on nothing is lost, and
        it goes to the front of the backlog.
        """
        seats = self._seats.pop(instance, None)
        if seats is None:
            return
        self._free = [entry for entry in self._free if entry[1] != instance]
        heapq.heapify(self._free)
        successors = []
        for sequence in filter(None, seats):
            successor = self._lose(sequence)
            if successor is not None:
                successors.append(successor)
        self._instance_removed(instance)
        for successor in sorted(successors, key=lambda s: s.queue[0].arrived, reverse=True):
            self._backlog[successor] = None
            self._backlog.move_to_end(successor, last=False)
        self._fill()

    def _lose(self, sequence: Sequence) -> Sequence | None:
        items = list(sequence.queue)
        for item in items:
            self._withdraw(item)
        sequence.queue.clear()
        sequence.instance = -1
        whole = next((at for at, item in enumerate(items) if item.start), len(items))
        self._refuse(items[:whole], self._admission.broken_off(sequence), ErrorCode.UNAVAILABLE)
        known = self._known.get(sequence.correlation_id) is sequence
        self._end(sequence)
        if whole == len(items):
            return None
        successor = Sequence(sequence.correlation_id)
        successor.complete = sequence.complete
        for item in items[whole:]:
            item.place = _QUEUED
            item.sequence = successor
            successor.queue.append(item)
        if known:
            self._known[sequence.correlation_id] = successor
        return successor

    def stop(self) -> None:
        """Let no sequence begin; those that began go on."""
        self._admission.stopped = True

    # -- slots ---------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give free slots to the sequences that wait longest."""
        while self._free and self._backlog:
            slot, instance = heapq.heappop(self._free)
            sequence, _ = self._backlog.popitem(last=False)
            sequence.instance, sequence.slot = instance, slot
            self._seats[instance][slot] = sequence
            self._offer(sequence)

    def _break_off(self, sequence: Sequence) -> None:
        """End a sequence that has nothing queued, but only when nothing of it is in flight."""
        if sequence.in_flight:
            sequence.broken = True
            self._forget(sequence)
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.queue.clear()
        sequence.closed = True
        self._forget(sequence)
        self._backlog.pop(sequence, None)
        if sequence.instance >= 0:
            self._seats[sequence.instance][sequence.slot] = None
            heapq.heappush(self._free, (sequence.slot, sequence.instance))
            sequence.instance = -1
            self._fill()

    def _forget(self, sequence: Sequence) -> None:
        if self._known.get(sequence.correlation_id) is sequence:
            del self._known[sequence.correlation_id]

    # -- what the strategies do differently ----------------------------------------------------

    @abstractmethod
    def _batch_times(self, now_ns: int) -> Iterable[int]:
        """Return the times at which batches become due that are not due yet."""

    def _landed(self, sequence: Sequence) -> None:
        """Something of the sequence, which is not closed, is no longer in flight."""
        sequence.in_flight -= 1

    def _in_order(self, item: SequenceItem, _now_ns: int) -> list[SequenceItem]:
        return [item]

    def _offer(self, sequence: Sequence) -> None:
        """The sequence has a slot or not, and perhaps an item that could go."""

    def _restore(self, items: Series[SequenceItem]) -> None:
        """Items that were put back are the first of their sequences again."""

    def _withdraw(self, item: SequenceItem) -> None:
        """A queued item is about to leave without being taken."""

    def _instance_added(self, instance: int) -> None:
        """An instance has slots now."""

    def _instance_removed(self, instance: int) -> None:
        """An instance has no slots any more."""


def _of(item: SequenceItem) -> Sequence:
    assert item.sequence is not None, "only padding belongs to no sequence"
    return item.sequence
