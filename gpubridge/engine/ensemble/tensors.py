"""Tensors between the steps of an ensemble: their memory and its lifetime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.engine.ensemble.graph import Step
from gpubridge.engine.memory.device_region import OF_CLIENTS
from gpubridge.engine.memory.placed_response import PlacedResponse, SharedSlot, held_bytes
from gpubridge.host_shm import HostArena
from gpubridge.model_io import as_configured
from gpubridge.request import (
    NO_BYTES,
    ClientUse,
    InferRequest,
    InferResponse,
    MemoryRange,
    Parameters,
)
from gpubridge.transport.signatures import Signature, decode_shapes

_NO_VIEW = memoryview(b"")

_Places = dict[str, list[int]]


class EdgeTensor(NamedTuple):
    """A tensor between two models, passed without a copy.

    - ``shape``: as clients see it, with the batch dimension if its producer has one.
    - ``batched``: whether its producer, a model or the ensemble, has a batch dimension.
    - ``buffer``: its bytes, if a response has them already.
    - ``shared``: whether other requests may still read it, so that it is read-only.
    """

    datatype: str
    shape: tuple[int, ...]
    batched: bool
    place: MemoryRange
    buffer: memoryview | None
    parameters: Parameters | None = None
    shared: bool = False

    def elsewhere(self) -> EdgeTensor:
        """Return a copy without bytes, as these are in the client's own memory."""
        return self._replace(place=NO_BYTES, buffer=_NO_VIEW)

    def bytes_held(self) -> memoryview:
        """Return a view of its bytes that keeps the memory from being reused."""
        if self.buffer is not None:
            return self.buffer
        return held_bytes(self.place)


def request_tensors(
    request: InferRequest,
    signature: Signature,
    arena: HostArena,
    *,
    batched: bool,
    shared: bool,
) -> dict[str, EdgeTensor]:
    """Take over the inputs of a request and its slot; return the tensors by name.

    - ``batched``: whether shapes begin with a batch dimension.
    - ``shared``: whether the sender may still read the inputs.
    """
    ranges = request.ranges
    slot, request.slot = request.slot, None
    client, request.client = request.client, None
    held = None if slot is None else SharedSlot(arena.free, slot)
    if ranges is None:
        base = 0 if slot is None else slot.offset + request.start
        ranges = [
            MemoryRange(slot.segment, base + at, nbytes, held)
            if slot is not None and nbytes
            else NO_BYTES
            for at, nbytes in request.places
        ]
    elif held is not None or client is not None:
        # The inputs keep the slot or the client's memory in use.
        ranges = [
            part
            if part.keep
            else part._replace(keep=client if isinstance(part.segment, OF_CLIENTS) else held)
            for part in ranges
        ]
    request.ranges = None
    shapes = decode_shapes(signature, request.dims)
    return {
        spec.name: EdgeTensor(spec.datatype, shape, batched, place, None, None, shared)
        for spec, shape, place in zip(signature.tensors, shapes, ranges, strict=True)
    }


def response_tensors(response: InferResponse, config: ModelConfig) -> dict[str, EdgeTensor]:
    """Return the outputs of a member's response, by its names."""
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
        tensors[spec.name] = EdgeTensor(
            spec.datatype,
            as_configured(spec.name, shape, config),
            config.max_batch_size > 0,
            place,
            buffer,
            response.parameters,
            spec.name in shared,
        )
    return tensors


class StepOutputs(NamedTuple):
    """The outputs of one step for the client's memory, by the member's names.

    - ``out``: outputs that are written to the client's memory only.
    - ``also``: outputs that are copied there, as other steps read them.
    """

    out: _Places
    also: _Places


class ClientOutputs:
    """The client's memory for outputs of a request; keeps it registered.

    - ``out``, ``also``: by the ensemble's output: region, offset and bytes. Outputs in ``also`` are
      returned in the response, too.
    """

    __slots__ = ("_use", "also", "out")

    def __init__(self, use: ClientUse, out: _Places, also: _Places) -> None:
        self._use = use
        self.out = out
        self.also = also

    @classmethod
    def of(cls, request: InferRequest) -> ClientOutputs | None:
        """Return the output memory of a request before its inputs are taken over; None if it has none."""
        use = request.client
        client = request.context.client
        if use is None or client is None:
            return None
        out, also = client.get("out", {}), client.get("also", {})
        return cls(use, out, also) if out or also else None

    @property
    def segments(self) -> list[Any]:
        """Return the regions."""
        return self._use.segments

    @property
    def names(self) -> set[str]:
        """Return the names of the outputs."""
        return {*self.out, *self.also}

    def of_step(self, step: Step, uses: Mapping[str, int]) -> StepOutputs:
        """Return the outputs of a step; ``uses``: the number of uses of each tensor."""
        out: _Places = {}
        also: _Places = {}
        for name, tensor in step.outputs.items():
            if tensor in self.also:
                also[name] = self.also[tensor]
            elif tensor in self.out:
                places = out if uses[tensor] == 1 else also
                places[name] = self.out[tensor]
        return StepOutputs(out, also)
