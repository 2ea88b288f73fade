"""Requests and responses inside the server: what doors make and engines answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Slot
from gpubridge.transport.signatures import Signature

__all__ = ["NO_OPTIONS", "InferRequest", "InferResponse", "Outcome", "RequestOptions"]


@dataclass(slots=True)
class InferResponse:
    """A model's answer to one request.

    Attributes
    ----------
    signature : Signature
        Names, datatypes and shapes of the outputs. The same object for the same form of answer.
    buffers : list of memoryview
        Their bytes, in the stub's output memory; that memory goes back when the last view is gone.
    parameters : dict
        Response parameters.
    """

    signature: Signature
    buffers: list[memoryview]
    parameters: dict[str, object] | None = None


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
    shapes : tuple of (str, tuple of int)
        Of its inputs, by name.
    shape_key : object
        What the model's dispatcher remembers of the shapes.
    """

    priority: int = 0
    timeout_us: int = 0
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    shape_key: object = None


NO_OPTIONS = RequestOptions()


class InferRequest:
    """One inference request on its way through the server.

    Who submits a request to a model gives it away: the model frees ``slot``, whatever happens, and
    calls ``on_done`` exactly once, on the event loop, unless :meth:`cancel` was called before.

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
    extras : bytes
        What else goes to the stub, as JSON.
    copied : int
        Bytes of tensor data that were copied on the way here.
    batch_size : int
        Its first dim where the model batches, else 1; 0 for a place in a batch that no request fills.
    options : RequestOptions
        For the scheduler.

    Attributes
    ----------
    arrived, place
        The scheduler's, which holds this object or, where it has to know more, another for it. The
        first is the time at which the model took it, in CLOCK_MONOTONIC nanoseconds.
    item : object
        What the scheduler holds for it; None for itself.
    pattern : InferRequest or None
        Another request of the same batch, whose inputs it has.
    """

    __slots__ = (
        "arrived",
        "batch_size",
        "cancelled",
        "copied",
        "extras",
        "identifier",
        "instance",
        "item",
        "on_done",
        "options",
        "pattern",
        "place",
        "places",
        "signature",
        "slot",
        "start",
        "ticket",
    )

    def __init__(  # noqa: PLR0913  (made once per request: no room for a builder)
        self,
        signature: bytes,
        slot: Slot | None,
        start: int,
        places: Sequence[tuple[int, int]],
        on_done: Callable[[Outcome], None],
        identifier: str = "",
        extras: bytes = b"",
        copied: int = 0,
        batch_size: int = 1,
        options: RequestOptions = NO_OPTIONS,
    ) -> None:
        self.signature = signature
        self.places = places
        self.slot = slot
        self.start = start
        self.on_done: Callable[[Outcome], None] | None = on_done
        self.identifier = identifier
        self.extras = extras
        self.copied = copied
        self.batch_size = batch_size
        self.options = options
        self.item: Any = None
        self.pattern: InferRequest | None = None
        self.arrived = 0
        self.cancelled: Callable[[InferRequest], None] | None = None
        self.ticket = -1
        self.instance: object = None

    def finish(self, outcome: Outcome) -> None:
        """Give the outcome to who waits for it; at most once."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(outcome)

    def cancel(self) -> None:
        """Say that nobody waits for the outcome any more; the model is spared the work if it can be."""
        self.on_done = None
        if self.cancelled is not None:
            self.cancelled(self)
