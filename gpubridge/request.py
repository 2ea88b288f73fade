"""Requests and responses inside the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpubridge.dataplane import InferRequest, InferResponseFields
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.context import RequestContext
from gpubridge.transport.device_events import is_arena
from gpubridge.transport.leases import BorrowedMemory


class MemoryRange(NamedTuple):
    """Bytes of a tensor in memory that can be passed to any stub without a copy.

    - ``segment``: the memory; None for no bytes, except on a device.
    - ``offset``, ``nbytes``: the range in the segment.
    - ``keep``: keeps the memory unchanged while it is referenced.
    """

    segment: Any
    offset: int
    nbytes: int
    keep: object


class PendingMemory:
    """Owner of device memory whose contents are complete when an event has completed.

    - ``keep``: as in `MemoryRange`; another PendingMemory for memory that has been passed on.
    - ``event``: see `gpubridge.engine.devices.edge_events`; the event of ``keep`` precedes it.
    """

    __slots__ = ("event", "keep")

    def __init__(self, keep: object, event: Any) -> None:
        self.keep = keep
        self.event = event


class ClientUse(Protocol):
    """Client memory that a request uses.

    ``outputs``: the outputs that are written there.
    """

    outputs: frozenset[str]

    @property
    def segments(self) -> list[Any]:
        """The segments that the stub needs."""


class EncodedParameters(NamedTuple):
    """Response parameters, encoded for clients.

    - ``members``: the members of a JSON object, separated by commas.
    - ``fields``: the same as fields of a ModelInferResponse.
    """

    members: memoryview
    fields: bytes


class LongParameters(NamedTuple):
    """Response parameters that take long to decode, and so stay encoded.

    ``parts``: later parts override equal names of earlier ones.
    """

    parts: Sequence[EncodedParameters | dict[str, object]]


Parameters = dict[str, object] | LongParameters


def merged_parameters(given: Iterable[Parameters | None]) -> Parameters | None:
    """Return the parameters of several responses; later ones override earlier ones."""
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

    - ``signature``: names, datatypes and ranks of the outputs; an equal signature is the same object.
    - ``buffers``: their bytes in the stub's output memory, which is released with the last view.
    - ``memory``: the stub's output memory, mapped by this process.
    - ``refs``: the place of each output in it.
    - ``event``: completes the outputs on a device; None if they are complete.
    """

    __slots__ = ()

    def ranges(self) -> list[MemoryRange]:
        """Return the memory of the outputs, to pass them to a stub; called when the response arrives."""
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
        """Return the buffers of the outputs; None for outputs on a device."""
        if self.memory is None or not self.memory.arena:
            return list(self.buffers)
        return [
            None if is_arena(ref[0]) else buffer
            for ref, buffer in zip(self.refs, self.buffers, strict=True)
        ]


NO_BYTES = MemoryRange(None, 0, 0, None)


def range_of(memory: BorrowedMemory, ref: tuple[int, int, int, int], view: object) -> MemoryRange:
    """Return the memory of a stub's tensor; ``view`` keeps its lease.

    The reference of a tensor without elements names only its device, if any.
    """
    if ref[2]:
        return MemoryRange(memory.segment(ref[0]), ref[1], ref[2], view)
    if is_arena(ref[0]) and memory.is_known(ref[0]):
        return MemoryRange(memory.segment(ref[0]), 0, 0, None)
    return NO_BYTES


Outcome = InferResponse | BridgeError


@dataclass(slots=True, eq=False)
class RequestOptions:
    """Scheduling options of a request; requests of one form share the object.

    - ``priority``: 1 is the highest, 0 means the model's default.
    - ``timeout_us``: the queue timeout, if the model allows override; 0 for none.
    - ``correlation_id``: its sequence; 0 and "" mean none.
    - ``start``, ``end``: whether it is the first, the last of its sequence.
    - ``shapes``: the shapes of its inputs by name, as the model sees them.
    - ``shape_id``: set by the model's scheduler to compare shapes.
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
    """A completed batch, for traces.

    Times are CLOCK_MONOTONIC nanoseconds: when the stub received the batch, called ``execute``, and when
    that returned.
    """

    sequence: int
    started: int
    called: int
    ended: int
    requests: Sequence[InferRequest]
