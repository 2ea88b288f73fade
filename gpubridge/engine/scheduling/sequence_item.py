"""Sequences, their requests as scheduler items, control tensors and timers."""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpubridge.engine.scheduling.sequence_settings import Control, ControlKind


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """An input of one element that the scheduler adds to a request.

    ``shape``: ``(1, 1)``, or ``(1,)`` for a model without batch dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    value: int | float | bool | str


class ControlPlan:
    """Makes the control tensors of requests; all but the correlation id are cached.

    ``batched``: the model has a batch dimension.
    """

    def __init__(self, controls: Iterable[Control], batched: bool) -> None:
        controls = tuple(controls)
        self._shape = (1, 1) if batched else (1,)
        self._correlation = next(
            (c for c in controls if c.kind is ControlKind.CONTROL_SEQUENCE_CORRID), None
        )
        self._flags = [c for c in controls if c is not self._correlation]
        self._running = {
            (start, end): self._flag_tensors(start, end, ready=True)
            for start in (False, True)
            for end in (False, True)
        }
        self._padding = self._flag_tensors(start=False, end=False, ready=False)

    def accepts(self, correlation_id: int | str) -> bool:
        """Return whether the model's correlation control can carry this id."""
        control = self._correlation
        return control is None or control.datatype == "BYTES" or isinstance(correlation_id, int)

    def of_request(
        self, correlation_id: int | str, *, start: bool, end: bool
    ) -> tuple[ControlTensor, ...]:
        """Return the tensors of a request of a sequence."""
        return self._running[start, end] + self._correlation_tensor(correlation_id)

    def of_padding(self) -> tuple[ControlTensor, ...]:
        """Return the tensors of padding: not ready, id 0."""
        control = self._correlation
        nothing = "" if control is not None and control.datatype == "BYTES" else 0
        return self._padding + self._correlation_tensor(nothing)

    def _flag_tensors(self, start: bool, end: bool, ready: bool) -> tuple[ControlTensor, ...]:
        raised = {
            ControlKind.CONTROL_SEQUENCE_START: start,
            ControlKind.CONTROL_SEQUENCE_END: end,
            ControlKind.CONTROL_SEQUENCE_READY: ready,
        }
        return tuple(
            ControlTensor(c.name, c.datatype, self._shape, c.true if raised[c.kind] else c.false)
            for c in self._flags
        )

    def _correlation_tensor(self, correlation_id: int | str) -> tuple[ControlTensor, ...]:
        control = self._correlation
        if control is None:
            return ()
        if control.datatype == "BYTES":
            value: int | str = str(correlation_id)
        else:
            value = _wrapped(int(correlation_id), control.datatype)
        return (ControlTensor(control.name, control.datatype, self._shape, value),)


def _wrapped(value: int, datatype: str) -> int:
    """Return the low bits of an unsigned id as `datatype` reads them, which is what Triton sends."""
    bits = 64 if datatype.endswith("64") else 32
    value &= (1 << bits) - 1
    if datatype.startswith("INT") and value >> (bits - 1):
        value -= 1 << bits
    return value


class ItemState(enum.IntEnum):
    """State of an item, which only its scheduler changes."""

    NEW = 0
    QUEUED = 1
    TAKEN = 2
    DONE = 3


# Enum members cost an attribute look-up each time; these are the same objects.
_NEW = ItemState.NEW


@dataclass(slots=True, eq=False)
class SequenceItem:
    """One request of a sequence, or padding of a batch.

    - ``request``: not read by the scheduler; None for padding.
    - ``correlation_id``: 0 and "" mean none.
    - ``start``, ``end``: the flags of the request; both False after rescheduling.
    - ``shape``: only items of one shape share a batch
      (`gpubridge.engine.scheduling.settings.ShapeIds`).
    - ``timeout_us``: limit for the sequence's wait for a slot; 0: none.
    - ``size``: its batch size; 1 for a model without batch dimension.

    Its attributes:

    - ``arrived``: the ``now_ns`` of its `add`.
    - ``controls``: set by `take`: inputs to add to the request.
    - ``instance``, ``slot``: set by `take`: the instance that executes it, and the sequence's slot
      there.
    - ``pattern``: for padding: an item of the same batch with the same datatypes and shapes.
    """

    request: Any
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    shape: int = 0
    timeout_us: int = 0
    size: int = 1
    arrived: int = 0
    state: ItemState = _NEW
    sequence: RequestSequence | None = None
    instance: int = -1
    slot: int = -1
    controls: tuple[ControlTensor, ...] = ()
    pattern: SequenceItem | None = None


@dataclass(slots=True, eq=False)
class RequestSequence:
    """Requests with one correlation id, from START to the end of the sequence.

    - ``instance``, ``slot``: its slot; -1 without one.
    - ``in_flight``: number of items that were taken and have no outcome.
    - ``complete``: END was received: no further requests.
    - ``aborted``: a request was cancelled: the sequence ends with the items in flight.
    - ``closed``: the sequence has ended and has no items.
    - ``deadline``, ``idle_since``, ``timer_at``: limit of the wait for a slot, begin of the idle time,
      and time at which its timer expires.
    - ``offered``: its item in an instance's batcher (oldest strategy).
    """

    correlation_id: int | str
    queue: deque[SequenceItem] = field(default_factory=deque)
    instance: int = -1
    slot: int = -1
    in_flight: int = 0
    complete: bool = False
    aborted: bool = False
    closed: bool = False
    deadline: int = 0
    idle_since: int = 0
    timer_at: int = 0
    offered: SequenceItem | None = None

    @property
    def busy(self) -> bool:
        """Return whether it has items queued or in flight."""
        return bool(self.queue) or self.in_flight > 0


class SequenceTimers:
    """Timers of sequences, at most one each; a timer that expires early is set again.

    ``idle_ns``: how long a sequence with a slot may be idle; 0: no limit.
    """

    def __init__(self, idle_ns: int) -> None:
        self._idle_ns = idle_ns
        self._heap: list[tuple[int, int, RequestSequence]] = []
        self._serial = 0

    def schedule(self, sequence: RequestSequence) -> None:
        """Set a sequence's timer; call when its deadline or idle time begins."""
        end = self._end(sequence)
        if end and not 0 < sequence.timer_at <= end:
            self._serial += 1
            sequence.timer_at = end
            heapq.heappush(self._heap, (end, self._serial, sequence))

    def next(self) -> int:
        """Return when the next sequence times out, in ns; 0: never."""
        heap = self._heap
        while heap:
            when, _, sequence = heap[0]
            if when == sequence.timer_at:
                if self._end(sequence) == when:
                    return when
                sequence.timer_at = 0
            heapq.heappop(heap)
            if not sequence.timer_at:
                self.schedule(sequence)
        return 0

    def due(self, now_ns: int) -> Iterator[RequestSequence]:
        """Yield sequences that timed out; the caller ends each before it takes the next."""
        while 0 < self.next() <= now_ns:
            sequence = heapq.heappop(self._heap)[2]
            sequence.timer_at = 0
            yield sequence

    def _end(self, sequence: RequestSequence) -> int:
        """Return when a sequence times out unless something happens; 0: never."""
        if sequence.closed:
            return 0
        if sequence.instance < 0:
            return sequence.deadline
        if sequence.busy or not self._idle_ns:
            return 0
        return sequence.idle_since + self._idle_ns
