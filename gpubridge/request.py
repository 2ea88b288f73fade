"""Requests and responses inside the server: what doors make and engines answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpubridge.dataplane import InferRequest, InferResponseFields
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.context import RequestContext
from gpubridge.transport.device_events import is_arena
from gpubridge.transport.leases import BorrowedMemory

__all__ = [
    "NO_BYTES",
    "NO_CONTEXT",
    "NO_OPTIONS",
    "NO_RESPONSE",
    "ClientUse",
    "CompletedBatch",
    "EncodedParameters",
    "InferRequest",
    "InferResponse",
    "LongParameters",
    "MemoryRange",
    "Outcome",
    "Parameters",
    "PendingMemory",
    "RequestOptions",
    "merged_parameters",
    "range_of",
]


class MemoryRange(NamedTuple):
    """Bytes of a tensor, wherever they lie: any stub can be handed them, and nobody copies them.

    - ``segment``: where; None for no bytes, those on a device excepted.
    - ``offset``, ``nbytes``: bytes from the segment's start; bytes.
    - ``keep``: as long as this is held, the memory stays what it is.
    """

    segment: Any
    offset: int
    nbytes: int
    keep: object


class PendingMemory:
    """Owner of device memory whose contents are complete when an event has come to pass.

    - ``keep``: as that of a `MemoryRange`; such an object, too, for memory that has been handed on.
    - ``event``: what has to come to pass (`gpubridge.engine.devices.edge_events`); that of ``keep``
      comes before it.
    """

    __slots__ = ("event", "keep")

    def __init__(self, keep: object, event: Any) -> None:
        self.keep = keep
        self.event = event


class ClientUse(Protocol):
    """A request's use of its client's own memory.

    ``outputs``: the outputs that are written there.
    """

    outputs: frozenset[str]

    @property
    def segments(self) -> list[Any]:
        """Everything of it that the stub needs."""


class EncodedParameters(NamedTuple):
    """Response parameters as they are told to clients.

    - ``members``: those of a JSON object, separated by commas.
    - ``fields``: the same in a ModelInferResponse.
    """

    members: memoryview
    fields: bytes


class LongParameters(NamedTuple):
    """Response parameters that would take long to decode: nobody does that.

    ``parts``: of parameters that two of them have, those of the later one count.
    """

    parts: Sequence[EncodedParameters | dict[str, object]]


Parameters = dict[str, object] | LongParameters


def merged_parameters(given: Iterable[Parameters | None]) -> Parameters | None:
    """Return those of several responses; later ones go before earlier ones."""
    distinct: dict[int, Parameters] = {}
    for each in given:
        if each:
            # Outputs of one response share its parameters.
            distinct.pop(id(each), None)
            distinct[id(each)] = each
    merged: dict[str, object] = {}
    parts: list[EncodedParameters | dict[str, object]] = []
    for each in distinct.values():
        if isinstance(each, LongParameters):
            parts += [merged, *each.parts] if merged else each.parts
            merged = {}
        else:
            merged = {**merged, **each}
    if not parts:
        return merged or None
    return LongParameters([*parts, merged] if merged else parts)


class InferResponse(InferResponseFields):
    """A model's answer to one request.

    - ``signature``: names, datatypes and ranks of the outputs. The same object for the same form of
      answer.
    - ``buffers``: their bytes, in the stub's output memory; that memory goes back when the last
      view is gone.
    - ``memory``: the stub's output memory as this process sees it.
    - ``refs``: where in it each output lies.
    - ``event``: what those on a device are complete with; None if they are.
    """

    __slots__ = ()

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
    """Scheduling options of a request; requests of one form share the object.

    - ``priority``: 1 is the highest, 0 means the model's default.
    - ``timeout_us``: how long it may wait, if the model lets requests say so; 0 for nothing.
    - ``correlation_id``: the sequence it belongs to; 0 and "" mean none.
    - ``start``, ``end``: whether it is the first, the last of its sequence.
    - ``shapes``: of its inputs, by name, as the model sees them.
    - ``shape_id``: what the model's scheduler remembers of the shapes.
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
NO_RESPONSE = BridgeError("the model ended this request without a response", ErrorCode.INTERNAL)


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
