"""Requests and responses inside the server: what doors make and engines answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Slot
from gpubridge.transport.signatures import Signature

__all__ = ["InferRequest", "InferResponse", "Outcome"]


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
        Its first dim where the model batches, else 1.

    Attributes
    ----------
    queued_at : int
        CLOCK_MONOTONIC nanoseconds at which the model took it.
    """

    __slots__ = (
        "batch_size",
        "cancelled",
        "copied",
        "extras",
        "identifier",
        "instance",
        "on_done",
        "places",
        "queued_at",
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
        self.queued_at = 0
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
