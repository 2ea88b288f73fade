"""Requests and responses inside the server: what doors make and engines answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Slot
from gpubridge.telemetry.traces import Trace
from gpubridge.transport.context import RequestContext
from gpubridge.transport.device_regions import is_arena
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.signatures import Shapes, Signature

__all__ = [
    "NO_BYTES",
    "NO_CONTEXT",
    "NO_OPTIONS",
    "ClientUse",
    "Completed",
    "CompletedBatch",
    "FollowedRequest",
    "InferRequest",
    "InferResponse",
    "MemoryRange",
    "Outcome",
    "PendingMemory",
    "RequestOptions",
    "range_of",
]


class MemoryRange(NamedTuple):
    """Bytes of a tensor, wherever they lie: any stub can be handed them, and nobody copies them.

    Attributes
    ----------
    segment : Segment, ClientSegment, a region on a device, or None
        Where; None for no bytes, those on a device excepted.
    offset, nbytes : int
        Bytes from the segment's start; bytes.
    keep : object
        As long as this is held, the memory stays what it is.
    """

    segment: Any
    offset: int
    nbytes: int
    keep: object


class PendingMemory:
    """What keeps memory on a device whose contents are complete when an event has come to pass.

    Attributes
    ----------
    keep : object
        As that of a `MemoryRange`; such an object, too, for memory that has been handed on.
    event : object
        What has to come to pass (`gpubridge.engine.devices.edge_events`); that of ``keep`` comes before it.
    """

    __slots__ = ("event", "keep")

    def __init__(self, keep: object, event: Any) -> None:
        self.keep = keep
        self.event = event


class ClientUse(Protocol):
    """What a request has to do with its client's own memory.

    Attributes
    ----------
    outputs : frozenset of str
        The outputs that are written there.
    """

    outputs: frozenset[str]

    @property
    def segments(self) -> list[Any]:
        """Everything of it that the stub needs."""


@dataclass(slots=True)
class InferResponse:
    """A model's answer to one request.

    Attributes
    ----------
    signature : Signature
        Names, datatypes and ranks of the outputs. The same object for the same form of answer.
    shapes : Shapes
        Their shapes.
    buffers : list of memoryview
        Their bytes, in the stub's output memory; that memory goes back when the last view is gone.
    parameters : dict
        Response parameters.
    memory : BorrowedMemory
        The stub's output memory as this process sees it.
    refs : sequence of (int, int, int, int)
        Where in it each output lies.
    event : object
        What those on a device are complete with; None if they are.
    """

    signature: Signature
    shapes: Shapes
    buffers: list[memoryview]
    parameters: dict[str, object] | None = None
    memory: BorrowedMemory | None = None
    refs: Sequence[tuple[int, int, int, int]] = ()
    event: Any = None

    def ranges(self) -> list[MemoryRange]:
        """Return where the outputs lie, to hand them on to a stub; asked when the response arrives."""
        memory = self.memory
        if memory is not None and self.event is None:
            return [
                range_of(memory, ref, buffer)
                for ref, buffer in zip(self.refs, self.buffers, strict=True)
            ]
        return [
            NO_BYTES if memory is None else range_of(memory, ref, self._keep(ref[0], buffer))
            for ref, buffer in zip(self.refs, self.buffers, strict=True)
        ]

    def _keep(self, region: int, buffer: memoryview) -> object:
        if self.event is None or not is_arena(region):
            return buffer
        return PendingMemory(buffer, self.event)

    def visible(self) -> list[memoryview | None]:
        """Return the buffers of the outputs; None for those that are on a device."""
        if self.memory is None or not self.memory.arena:
            return list(self.buffers)
        return [
            None if is_arena(ref[0]) else buffer
            for ref, buffer in zip(self.refs, self.buffers, strict=True)
        ]


NO_BYTES = MemoryRange(None, 0, 0, None)


def range_of(memory: BorrowedMemory, ref: tuple[int, int, int, int], view: object) -> MemoryRange:
    """Return where a stub's tensor lies; ``view`` keeps its lease.

    Of a tensor without elements the reference only says on which device it is, if on one.
    """
    if ref[2]:
        return MemoryRange(memory.segment(ref[0]), ref[1], ref[2], view)
    if is_arena(ref[0]) and memory.knows(ref[0]):
        return MemoryRange(memory.segment(ref[0]), 0, 0, None)
    return NO_BYTES


Outcome = InferResponse | BridgeError


@dataclass(slots=True, eq=False)
class RequestOptions:
    """What a scheduler wants to know of a request; the same object for the same form of request.

    Attributes
    ----------
    priority : int
        1 is the highest, 0 means the model's default.
    timeout_us : int
        How long it may wait, if the model lets requests say so; 0 for nothing.
    correlation_id : int or str
        The sequence it belongs to; 0 and "" mean none.
    start, end : bool
        Whether it is the first, the last of its sequence.
    shapes : iterable of (str, tuple of int)
        Of its inputs, by name, as the model sees them.
    shape_id : object
        What the model's scheduler remembers of the shapes.
    """

    priority: int = 0
    timeout_us: int = 0
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    shapes: Iterable[tuple[str, tuple[int, ...]]] = ()
    shape_id: object = None


NO_OPTIONS = RequestOptions()
NO_CONTEXT = RequestContext()
_NO_RESPONSE = BridgeError("the model ended this request without a response", ErrorCode.INTERNAL)


class FollowedRequest(Protocol):
    """Hears what becomes of a request that is traced, beside its outcome."""

    @property
    def trace(self) -> Trace:
        """Its trace, for the requests that come of it."""

    def completed(self, batch: CompletedBatch | None) -> None:
        """Its batch is over; None where there is none."""

    def abandoned(self) -> None:
        """Nobody waits for the outcome any more."""


class InferRequest:
    """One inference request on its way through the server.

    Who submits a request to a model gives it away: the model frees ``slot``, whatever happens, and
    calls ``on_done`` exactly once, on the event loop, unless :meth:`cancel` was called before. Where
    a model may send several responses, ``on_partial`` gets each that is not the last.

    Parameters
    ----------
    signature : bytes
        The encoded signature of its inputs and of the outputs asked for.
    slot : Slot or None
        The memory that holds all inputs.
    start : int
        Where in the slot they begin.
    places : sequence of (int, int)
        Offset from there and number of bytes of each input.
    on_done : callable
        Gets the response or the error.
    identifier : str
        The client's id of the request.
    context : RequestContext
        What else goes to the stub.
    copied : int
        Bytes of tensor data that were copied on the way here.
    batch_size : int
        Its first dim where the model batches, else 1; 0 for a place in a batch that no request fills.
    options : RequestOptions
        For the scheduler.
    dims : bytes
        The encoded dims of its inputs, as the model sees them.

    Attributes
    ----------
    on_partial : callable or None
        Gets a response, or an error in the place of one, after which others may come; ``on_done``
        then gets the last one, or None if there was only the word that no more come. Who has set
        this calls :meth:`passed_on` for what it got, or the model has to wait. Not set: the first
        response is the outcome.
    trace : FollowedRequest or None
        Who follows it, if it is traced.
    arrived : int
        When the model took it, in CLOCK_MONOTONIC nanoseconds.
    item : object
        What a sequence batcher holds for it; None where the scheduler holds the request itself.
    pattern : InferRequest or None
        Another request of the same batch, whose inputs it has.
    unsent : int
        How many responses that are not the last were handed out, and not yet passed on.
    ranges : sequence of MemoryRange or None
        Where each input lies, if not all of them are in the slot at ``places``. The slot, if there is
        one, is freed as ever.
    client : ClientUse or None
        Held while the client's own memory may be read or written for it; then there are ``ranges``.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "batch_size",
        "cancelled",
        "client",
        "context",
        "copied",
        "dims",
        "first",
        "identifier",
        "instance",
        "item",
        "on_done",
        "on_partial",
        "options",
        "pattern",
        "places",
        "ranges",
        "signature",
        "slot",
        "start",
        "ticket",
        "trace",
        "unsent",
    )

    def __init__(  # noqa: PLR0913  (made once per request: no room for a builder)
        self,
        signature: bytes,
        slot: Slot | None,
        start: int,
        places: Sequence[tuple[int, int]],
        on_done: Callable[[Any], None],
        identifier: str = "",
        context: RequestContext = NO_CONTEXT,
        copied: int = 0,
        batch_size: int = 1,
        options: RequestOptions = NO_OPTIONS,
        dims: bytes = b"",
    ) -> None:
        self.signature = signature
        self.dims = dims
        self.places = places
        self.slot = slot
        self.start = start
        self.on_done: Callable[[Any], None] | None = on_done
        self.on_partial: Callable[[Outcome], None] | None = None
        self.first: Outcome | None = None
        self.identifier = identifier
        self.context = context
        self.copied = copied
        self.batch_size = batch_size
        self.options = options
        self.item: Any = None
        self.pattern: InferRequest | None = None
        self.client: ClientUse | None = None
        self.ranges: Sequence[MemoryRange] | None = None
        self.arrived = 0
        self.cancelled: Callable[[InferRequest], None] | None = None
        self.ticket = -1
        self.trace: FollowedRequest | None = None
        self.unsent = 0
        self.instance: Any = None

    def respond(self, outcome: Outcome) -> None:
        """Give a response that is not the last to who waits for it."""
        self.unsent += 1
        if self.on_done is not None and self.on_partial is not None:
            self.on_partial(outcome)
            return
        if self.first is None and self.on_done is not None:
            self.first = outcome
        self.passed_on(1)

    def passed_on(self, responses: int) -> None:
        """Say that so many of the responses have left, so that the model may send others."""
        self.unsent -= responses
        if self.instance is not None:
            self.instance.passed_on(self, responses)

    def finish(self, outcome: Outcome | None) -> None:
        """Give the outcome to who waits for it; at most once."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            if outcome is None and self.on_partial is None:
                outcome = self.first or _NO_RESPONSE
            on_done(outcome)

    def cancel(self) -> None:
        """Say that nobody waits for the outcome any more; the model is spared the work if it can be."""
        self.on_done = None
        if self.cancelled is not None:
            self.cancelled(self)


class CompletedBatch(NamedTuple):
    """An answered batch, for who follows its requests.

    Times are CLOCK_MONOTONIC nanoseconds: when the stub took the batch up, called ``execute``, and had
    its return value.
    """

    sequence: int
    started: int
    called: int
    ended: int
    requests: Sequence[InferRequest]


class Completed(NamedTuple):
    """What came of a message with the results of batches; they are counted already.

    Attributes
    ----------
    outcomes : sequence of (InferRequest, Outcome)
        Requests that are over.
    returning : sequence of InferRequest
        Those that their model wants to have again.
    traced : sequence of CompletedBatch
        The batches of requests that are traced.
    batches, requests, execute_ns : int
        How many, and how long they were executed.
    error : Exception, str or None
        What the message could not be taken further for: the stub is to blame for a text.
    """

    outcomes: Sequence[tuple[InferRequest, Outcome]] = ()
    returning: Sequence[InferRequest] = ()
    traced: Sequence[CompletedBatch] = ()
    batches: int = 0
    requests: int = 0
    execute_ns: int = 0
    error: Exception | str | None = None
