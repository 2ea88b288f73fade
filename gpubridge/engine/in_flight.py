"""The requests at one stub: what the compiled `InFlightRequests` asks for, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpubridge.dataplane import InFlightRequests, ModelCounters
from gpubridge.request import (
    NO_CONTEXT,
    Completed,
    CompletedBatch,
    InferRequest,
    InferResponse,
    Outcome,
)
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record, record_reader

__all__ = [
    "InFlightHooks",
    "requests_at_stub",
]


class InFlightHooks(NamedTuple):
    """What Python does for the requests at a stub.

    Attributes
    ----------
    free : callable
        Takes back a slot of the arena.
    memory : BorrowedMemory
        The stub's output memory.
    counters : ModelCounters
        The model's: batches are counted there.
    announced : set of int
        The regions that the stub knows.
    announce : callable
        Tells it of the region of a slot.
    references : callable
        Returns the references of a request that does not just lie in its slot, as the fields of all of
        them one after another, and its encoded context.
    decode : callable
        Returns what a response out of the ordinary is, and why its request failed, if it has.
    """

    free: Callable[[Any], None]
    memory: BorrowedMemory
    counters: ModelCounters
    announced: set[int]
    announce: Callable[[Any], None]
    references: Callable[[InferRequest], tuple[Sequence[int], bytes]]
    decode: Callable[[Record, InferRequest], tuple[Outcome, str | None]]
    response: type[InferResponse] = InferResponse
    batch: type[CompletedBatch] = CompletedBatch
    completed: type[Completed] = Completed
    no_context: object = NO_CONTEXT


def requests_at_stub(control: ControlPage, hooks: InFlightHooks) -> InFlightRequests:
    """Return the requests at a stub, of which there are none yet."""
    reader = record_reader(ResponseContext)
    return InFlightRequests(
        control.lent, control.cancelled, control.passed_on, control.progress, reader, hooks
    )
