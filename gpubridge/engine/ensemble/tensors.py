"""Tensors on their way through an ensemble: where they lie, and what keeps them there."""

from __future__ import annotations

from typing import NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.engine.devices.segments import OF_CLIENTS
from gpubridge.engine.placed_response import PlacedResponse, held_bytes
from gpubridge.engine.shared_slot import SharedSlot
from gpubridge.host_shm import HostArena
from gpubridge.model_io import as_configured
from gpubridge.request import NO_BYTES, InferRequest, InferResponse, MemoryRange
from gpubridge.transport.signatures import Signature, decode_shapes

__all__ = ["FlowTensor", "request_tensors", "response_tensors"]


_NO_VIEW = memoryview(b"")


class FlowTensor(NamedTuple):
    """A tensor between two models; nobody copies it.

    Attributes
    ----------
    shape : tuple of int
        As clients see it, with the batch dimension where who made it has one.
    place : MemoryRange
        Where it lies, for the next stub.
    buffer : memoryview or None
        Its bytes, where a response has them anyway.
    parameters : dict or None
        Of the response that it came with.
    shared : bool
        Whether others may still look at it, so that nobody may write to it.
    """

    datatype: str
    shape: tuple[int, ...]
    place: MemoryRange
    buffer: memoryview | None
    parameters: dict[str, object] | None = None
    shared: bool = False

    def elsewhere(self) -> FlowTensor:
        """Return it as one whose bytes are in the client's own memory."""
        return self._replace(place=NO_BYTES, buffer=_NO_VIEW)

    def bytes_held(self) -> memoryview:
        """Return its bytes; the memory stays what it is as long as a view of them exists."""
        if self.buffer is not None:
            return self.buffer
        return held_bytes(self.place)


def request_tensors(
    request: InferRequest, signature: Signature, arena: HostArena, *, shared: bool
) -> dict[str, FlowTensor]:
    """Take the inputs of a request over, and with them its slot; by name.

    ``shared`` says whether who sent it may still look at them.
    """
    ranges = request.ranges
    slot, request.slot = request.slot, None
    client, request.client = request.client, None
    held = None if slot is None else SharedSlot(arena, slot)
    if ranges is None:
        base = 0 if slot is None else slot.offset + request.start
        ranges = [
            MemoryRange(slot.segment, base + at, nbytes, held)
            if slot is not None and nbytes
            else NO_BYTES
            for at, nbytes in request.places
        ]
    elif held is not None or client is not None:
        # They lie in the slot, or in memory of the client that is in use until the last one is done.
        ranges = [
            part
            if part.keep
            else part._replace(keep=client if isinstance(part.segment, OF_CLIENTS) else held)
            for part in ranges
        ]
    request.ranges = None
    shapes = decode_shapes(signature, request.dims)
    return {
        spec.name: FlowTensor(spec.datatype, shape, place, None, None, shared)
        for spec, shape, place in zip(signature.tensors, shapes, ranges, strict=True)
    }


def response_tensors(response: InferResponse, config: ModelConfig) -> dict[str, FlowTensor]:
    """Return the outputs of a member, by its names; asked when the response arrives."""
    tensors = {}
    shared = response.shared if isinstance(response, PlacedResponse) else ()
    parts = zip(
        response.signature.tensors,
        response.shapes,
        response.ranges(),
        response.buffers,
        strict=True,
    )
    for spec, shape, place, buffer in parts:
        tensors[spec.name] = FlowTensor(
            spec.datatype,
            as_configured(spec.name, shape, config),
            place,
            buffer,
            response.parameters,
            spec.name in shared,
        )
    return tensors
