"""A request of a sequence, and the sequence itself."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

from gpubridge.engine.scheduling.control import ControlTensor

__all__ = ["Place", "Sequence", "SequenceItem"]


class Place(enum.IntEnum):
    """Where an item is; only the scheduler that holds it changes this."""

    NEW = 0
    QUEUED = 1
    TAKEN = 2
    GONE = 3


# Enum members cost an attribute look-up each time; these are the same objects.
_NEW = Place.NEW


class SequenceItem:
    """One request of a sequence, or a place in a batch that no request fills.

    Parameters
    ----------
    request : object
        The scheduler never looks at it; None for padding.
    correlation_id : int or str
        0 and "" mean none.
    start, end : bool
        The flags of the request; of a rescheduled one both are False.
    shape : int
        Only items of one shape share a batch (`gpubridge.engine.scheduling.shape_ids.ShapeIds`).
    timeout_us : int
        What the request asks for, 0 for nothing; it only matters while the sequence waits for a slot.
    size : int
        Its batch size; 1 for a model without batch dimension.

    Attributes
    ----------
    arrived : int
        The ``now_ns`` of its `add`.
    place : Place
    controls : tuple of ControlTensor
        Set by `take`: the inputs to add to the request.
    instance, slot : int
        Set by `take`: who got it last, and in which of its slots the sequence lives. Nobody else
        lives there before the sequence is over.
    pattern : SequenceItem or None
        Of padding: the item of the same batch whose inputs' datatypes and shapes it has.
    """

    __slots__ = (
        "arrived",
        "controls",
        "correlation_id",
        "end",
        "instance",
        "pattern",
        "place",
        "request",
        "sequence",
        "shape",
        "size",
        "slot",
        "start",
        "timeout_us",
    )

    def __init__(  # noqa: PLR0913  (made once per request: no room for a builder)
        self,
        request: Any,
        correlation_id: int | str = 0,
        start: bool = False,
        end: bool = False,
        shape: int = 0,
        timeout_us: int = 0,
        size: int = 1,
    ) -> None:
        self.request = request
        self.size = size
        self.shape = shape
        self.timeout_us = timeout_us
        self.arrived = 0
        self.place = _NEW
        self.correlation_id = correlation_id
        self.start = start
        self.end = end
        self.sequence: Sequence | None = None
        self.instance = self.slot = -1
        self.controls: tuple[ControlTensor, ...] = ()
        self.pattern: SequenceItem | None = None


class Sequence:
    """Requests with one correlation id, between a START and whatever ends them.

    Attributes
    ----------
    queue : deque of SequenceItem
        What was not taken yet.
    instance, slot : int
        Where it lives; -1 while it has no slot.
    in_flight : int
        Items that were taken and not answered.
    complete : bool
        Its END has come: it gets no further requests.
    broken : bool
        A request in its midst was cancelled: it ends with what is in flight.
    closed : bool
        It is over, and holds nothing.
    """

    __slots__ = (
        "broken",
        "closed",
        "complete",
        "correlation_id",
        "deadline",
        "idle_since",
        "in_flight",
        "instance",
        "offered",
        "queue",
        "slot",
        "watched",
    )

    def __init__(self, correlation_id: int | str) -> None:
        self.correlation_id = correlation_id
        self.queue: deque[SequenceItem] = deque()
        self.instance = -1
        self.slot = -1
        self.in_flight = 0
        self.complete = False
        self.broken = False
        self.closed = False
        # When it must have got a slot, since when it has nothing to do, and when its timer rings.
        self.deadline = 0
        self.idle_since = 0
        self.watched = 0
        # Its item that is in an instance's batcher (oldest strategy).
        self.offered: SequenceItem | None = None

    @property
    def busy(self) -> bool:
        """Whether something of it is queued or in flight."""
        return bool(self.queue) or self.in_flight > 0
