"""Base class of both sequence batchers: slots, backlog and end of sequences."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gpubridge.engine.scheduling.scheduler import Refusal
from gpubridge.engine.scheduling.sequence_admission import Admission
from gpubridge.engine.scheduling.sequence_item import (
    ControlPlan,
    ItemState,
    RequestSequence,
    SequenceItem,
    SequenceTimers,
)
from gpubridge.engine.scheduling.sequence_settings import SequenceBatching
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.control import LARGEST_BATCH

_QUEUED = ItemState.QUEUED
_TAKEN = ItemState.TAKEN
_DONE = ItemState.DONE


class SequenceScheduler(ABC):
    """Keeps the requests of a sequence in order and on one instance.

    A sequence gets the free slot with the lowest number, on any instance. It keeps the slot until its
    END is completed, it was idle for too long, one of its queued requests is cancelled, or its
    instance dies. Without a free slot it waits with its requests in the backlog. After an early end,
    requests are refused until the next START.

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
        self._known: dict[int | str, RequestSequence] = {}
        self._backlog: OrderedDict[RequestSequence, None] = OrderedDict()
        self._assigned: dict[int, list[RequestSequence | None]] = {}
        self._free: list[tuple[int, int]] = []
        self._timers = SequenceTimers(settings.max_sequence_idle_us * 1000)
        self._refused: list[Refusal] = []
        self._queued = 0

    # -- adding requests -------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Return the number of queued items, including those that `refused` will return."""
        return self._queued + len(self._refused)

    def add(self, item: SequenceItem, now_ns: int) -> None:
        """Queue a request.

        Raises BridgeError: ``INVALID_ARG``: it has more than one element, no correlation id, an id of
        the wrong type, or no START although its sequence does not exist. ``UNAVAILABLE``: it starts
        a sequence after `stop`.
        """
        self._expire(now_ns)
        self._admission.check(item, self._known)
        sequence = self._known.get(item.correlation_id)
        if sequence is None:
            sequence = self._known[item.correlation_id] = RequestSequence(item.correlation_id)
            self._backlog[sequence] = None
        elif item.start:
            self._admission.warn_of_conflict(item)
        item.arrived = now_ns
        item.state = _QUEUED
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
            self._timers.schedule(sequence)
        else:
            self._offer(sequence)

    # -- taking and refusing requests -------------------------------------------------------------------------

    def give_up(self, instance: int, tickets: int) -> list[SequenceItem]:
        """End the sequences whose next request needs more tickets than there are; return their queued items.

        The caller refuses these. What frees a ticket may wait with them, as it may be a later request at which
        a model lets go of an input.
        """
        if tickets >= self._slots:
            return []
        items = []
        for sequence in [*filter(None, self._assigned.get(instance, ()))]:
            if tickets >= self._tickets_of(sequence):
                continue
            for item in sequence.queue:
                self._withdraw(item)
                item.state = _DONE
                items.append(item)
            self._queued -= len(sequence.queue)
            sequence.queue.clear()
            self._abort(sequence)
        return items

    @abstractmethod
    def take(
        self, instance: int, now_ns: int, most: int = LARGEST_BATCH
    ) -> list[SequenceItem] | None:
        """Return the next batch of an instance, with control tensors and slots; None if none is due.

        ``most``: the number of items that may be taken, as many as `give_up` was told of.
        """

    def _take_first(self, item: SequenceItem) -> None:
        """Take the first item of its sequence, and set its slot and control tensors."""
        sequence = _sequence_of(item)
        sequence.queue.popleft()
        item.instance, item.slot = sequence.instance, sequence.slot
        sequence.in_flight += 1
        self._queued -= 1
        item.state = _TAKEN
        item.controls = self._controls.of_request(
            item.correlation_id, start=item.start, end=item.end
        )

    def next_wakeup(self, now_ns: int) -> int | None:
        """Return the time of the next batch or sequence time-out; None if there is none."""
        if self._refused:
            return now_ns
        times = [*self._batch_times(now_ns), *filter(None, [self._timers.next()])]
        return max(min(times), now_ns) if times else None

    def refused(self, now_ns: int) -> list[Refusal]:
        """Return items that will not be executed, as their sequence timed out, was cancelled or died."""
        self._expire(now_ns)
        refused, self._refused = self._refused, []
        return refused

    def _expire(self, now_ns: int) -> None:
        for sequence in self._timers.due(now_ns):
            if sequence in self._backlog:
                self._refuse(
                    sequence.queue,
                    "timeout of the corresponding sequence has been expired",
                    ErrorCode.UNAVAILABLE,
                )
            self._end(sequence)

    def _refuse(self, items: Iterable[SequenceItem], text: str, code: ErrorCode) -> None:
        """Refuse queued items; the caller removes them from the queue."""
        for item in items:
            self._withdraw(item)
            item.state = _DONE
            self._queued -= 1
            self._refused.append((item, BridgeError(text, code)))

    def clear(self) -> list[SequenceItem]:
        """Return all queued items and end every sequence."""
        items = [item for item, _ in self._refused]
        self._refused = []
        assigned = [
            sequence
            for slots in self._assigned.values()
            for sequence in slots
            if sequence is not None
        ]
        for sequence in [*self._backlog, *assigned]:
            for item in sequence.queue:
                self._withdraw(item)
                item.state = _DONE
                items.append(item)
            sequence.queue.clear()
        self._queued = 0
        # The backlog first: ending the others would give it their slots.
        for sequence in [*self._backlog, *assigned]:
            self._abort(sequence)
        return items

    # -- completion, rescheduling and cancellation -----------------------------------------------------------------------

    def answered(self, item: SequenceItem, now_ns: int) -> list[SequenceItem]:
        """Record the outcome of a taken item; return the items whose outcomes may be delivered now.

        Reporting padding is optional.
        """
        sequence = item.sequence
        if sequence is None or item.state is not _TAKEN:
            return []
        item.state = _DONE
        if not sequence.closed:
            self._completed(sequence)
            if sequence.busy:
                self._offer(sequence)
            elif sequence.complete or sequence.aborted or self._admission.iterative:
                self._end(sequence)
            else:
                sequence.idle_since = now_ns
                self._timers.schedule(sequence)
        return self._ordered(item, now_ns)

    def reschedule(self, item: SequenceItem, now_ns: int) -> None:
        """Queue a taken item again, as the next request of its sequence.

        Raises BridgeError: ``INVALID_ARG``: the model has no ``iterative_sequence``, or the
        sequence has ended. The caller then reports the item by `answered`.
        """
        if not self._admission.iterative:
            raise self._admission.not_iterative()
        sequence = _sequence_of(item)
        if sequence.closed or sequence.aborted:
            raise self._admission.not_started(item)
        self._completed(sequence)
        item.start = item.end = False
        item.arrived = now_ns
        item.state = _QUEUED
        # Before later requests of the client, which wait for the end of this one.
        sequence.queue.appendleft(item)
        self._queued += 1
        self._offer(sequence)

    def put_back(self, items: Sequence[SequenceItem]) -> None:
        """Put items that were never started back to the front of their sequences."""
        restored = []
        for item in reversed(items):
            sequence = item.sequence
            if sequence is None or item.state is not _TAKEN:
                continue
            item.state = _QUEUED
            self._queued += 1
            if sequence.closed:
                self._refuse([item], self._admission.aborted_text(sequence), ErrorCode.UNAVAILABLE)
                continue
            self._completed(sequence)
            if sequence.aborted:
                self._refuse([item], self._admission.aborted_text(sequence), ErrorCode.CANCELLED)
                self._end(sequence)
                continue
            sequence.queue.appendleft(item)
            restored.append(item)
        self._restore(restored[::-1])

    def cancel(self, item: SequenceItem) -> bool:
        """Remove an item that was not taken, and end its sequence; return whether that was so.

        A sequence never continues with a gap: `refused` returns its other queued items.
        """
        sequence = item.sequence
        if sequence is None or item.state is not _QUEUED:
            return False
        self._withdraw(item)
        sequence.queue.remove(item)
        item.state = _DONE
        self._queued -= 1
        self._refuse(sequence.queue, self._admission.aborted_text(sequence), ErrorCode.CANCELLED)
        sequence.queue.clear()
        self._abort(sequence)
        return True

    def releasable(self) -> list[SequenceItem]:
        """Return further items whose outcomes may be delivered since the last `answered`."""
        return []

    # -- instances -----------------------------------------------------------------------------

    def instance_up(self, instance: int) -> None:
        """Open the slots of an instance."""
        if instance not in self._assigned:
            self._assigned[instance] = [None] * self._slots
            for slot in range(self._slots):
                heapq.heappush(self._free, (slot, instance))
            self._instance_added(instance)
            self._fill()

    def instance_died(self, instance: int, _now_ns: int) -> None:
        """Remove the slots of an instance and end their sequences.

        Their queued items are refused up to the first START; from there on, the items form a new
        sequence at the front of the backlog.
        """
        assigned = self._assigned.pop(instance, None)
        if assigned is None:
            return
        self._free = [entry for entry in self._free if entry[1] != instance]
        heapq.heapify(self._free)
        successors = []
        for sequence in filter(None, assigned):
            successor = self._end_with_instance(sequence)
            if successor is not None:
                successors.append(successor)
        self._instance_removed(instance)
        for successor in sorted(successors, key=lambda s: s.queue[0].arrived, reverse=True):
            self._backlog[successor] = None
            self._backlog.move_to_end(successor, last=False)
        self._fill()

    def _end_with_instance(self, sequence: RequestSequence) -> RequestSequence | None:
        items = list(sequence.queue)
        for item in items:
            self._withdraw(item)
        sequence.queue.clear()
        sequence.instance = -1
        whole = next((at for at, item in enumerate(items) if item.start), len(items))
        self._refuse(items[:whole], self._admission.aborted_text(sequence), ErrorCode.UNAVAILABLE)
        known = self._known.get(sequence.correlation_id) is sequence
        self._end(sequence)
        if whole == len(items):
            return None
        successor = RequestSequence(sequence.correlation_id)
        successor.complete = sequence.complete
        for item in items[whole:]:
            item.state = _QUEUED
            item.sequence = successor
            successor.queue.append(item)
        if known:
            self._known[sequence.correlation_id] = successor
        return successor

    def stop(self) -> None:
        """Refuse new sequences; existing ones continue."""
        self._admission.stopped = True

    # -- slots ---------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Assign free slots to the sequences that have waited longest."""
        while self._free and self._backlog:
            slot, instance = heapq.heappop(self._free)
            sequence, _ = self._backlog.popitem(last=False)
            sequence.instance, sequence.slot = instance, slot
            self._assigned[instance][slot] = sequence
            self._offer(sequence)

    def _abort(self, sequence: RequestSequence) -> None:
        """End a sequence without queued items, once none of its items is in flight."""
        if sequence.in_flight:
            sequence.aborted = True
            self._forget(sequence)
        else:
            self._end(sequence)

    def _end(self, sequence: RequestSequence) -> None:
        sequence.queue.clear()
        sequence.closed = True
        self._forget(sequence)
        self._backlog.pop(sequence, None)
        if sequence.instance >= 0:
            self._assigned[sequence.instance][sequence.slot] = None
            heapq.heappush(self._free, (sequence.slot, sequence.instance))
            sequence.instance = -1
            self._fill()

    def _forget(self, sequence: RequestSequence) -> None:
        if self._known.get(sequence.correlation_id) is sequence:
            del self._known[sequence.correlation_id]

    # -- overridden by the strategies ----------------------------------------------------

    @abstractmethod
    def _batch_times(self, now_ns: int) -> Iterable[int]:
        """Return the times at which further batches become due."""

    def _tickets_of(self, sequence: RequestSequence) -> int:
        """Return how many tickets the smallest batch with the sequence's next request takes."""
        return min(len(sequence.queue), 1)

    def _completed(self, sequence: RequestSequence) -> None:
        """Record that an item of an open sequence is no longer in flight."""
        sequence.in_flight -= 1

    def _ordered(self, item: SequenceItem, _now_ns: int) -> list[SequenceItem]:
        return [item]

    def _offer(self, sequence: RequestSequence) -> None:
        """Offer the first item of a sequence for batching, if it has a slot and an item."""

    def _restore(self, items: Sequence[SequenceItem]) -> None:
        """Handle items that were put back to the front of their sequences."""

    def _withdraw(self, item: SequenceItem) -> None:
        """Handle a queued item that leaves without being taken."""

    def _instance_added(self, instance: int) -> None:
        """Handle an added instance."""

    def _instance_removed(self, instance: int) -> None:
        """Handle a removed instance."""


def _sequence_of(item: SequenceItem) -> RequestSequence:
    assert item.sequence is not None, "only padding belongs to no sequence"
    return item.sequence
