"""Tensors on their way through an ensemble: where they lie, and what keeps them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.engine.devices.region import OF_CLIENTS
from gpubridge.engine.ensemble.graph import Step
from gpubridge.engine.lent_memory import SharedSlot
from gpubridge.engine.placed_response import PlacedResponse, held_bytes
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


class FlowTensor(NamedTuple):
    """A tensor between two models; nobody copies it.

    - ``shape``: as clients see it, with the batch dimension where who made it has one.
    - ``batched``: whether the model that made it batches, or the ensemble whose input it is.
    - ``buffer``: its bytes, where a response has them anyway.
    - ``shared``: whether others may still look at it, so that nobody may write to it.
    """

    datatype: str
    shape: tuple[int, ...]
    batched: bool
    place: MemoryRange
    buffer: memoryview | None
    parameters: Parameters | None = None
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
    request: InferRequest,
    signature: Signature,
    arena: HostArena,
    *,
    batched: bool,
    shared: bool,
) -> dict[str, FlowTensor]:
    """Take the inputs of a request over, and with them its slot; by name.

    - ``batched``: whether their shapes begin with a batch dimension.
    - ``shared``: whether who sent it may still look at them.
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
        spec.name: FlowTensor(spec.datatype, shape, batched, place, None, None, shared)
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
            config.max_batch_size > 0,
            place,
            buffer,
            response.parameters,
            spec.name in shared,
        )
    return tensors


class StepOutputs(NamedTuple):
    """The part of it that concerns one step, by the member's names of the outputs.

    - ``out``: those that are written to the client's memory, and nowhere else.
    - ``also``: those that are copied there, since somebody else needs them, too.
    """

    out: _Places
    also: _Places


class ClientOutputs:
    """Places in which a request wants outputs.

    - ``out``, ``also``: by the ensemble's output: region, offset and bytes. Those of the second
      kind are wanted in the response as well.
    - ``segments``: the regions; none of them can go while this object lives.
    """

    __slots__ = ("_use", "also", "out")

    def __init__(self, use: ClientUse, out: _Places, also: _Places) -> None:
        self._use = use
        self.out = out
        self.also = also

    @classmethod
    def of(cls, request: InferRequest) -> ClientOutputs | None:
        """Return those of a request whose memory nobody has taken over yet; None without any."""
        use = request.client
        client = request.context.client
        if use is None or client is None:
            return None
        out, also = client.get("out", {}), client.get("also", {})
        return cls(use, out, also) if out or also else None

    @property
    def segments(self) -> list[Any]:
        """The regions."""
        return self._use.segments

    @property
    def names(self) -> set[str]:
        """The outputs."""
        return {*self.out, *self.also}

    def of_step(self, step: Step, uses: Mapping[str, int]) -> StepOutputs:
        """Return what a step writes; ``uses`` says how often each tensor is needed."""
        out: _Places = {}
        also: _Places = {}
        for name, tensor in step.outputs.items():
            if tensor in self.also:
                also[name] = self.also[tensor]
            elif tensor in self.out:
                places = out if uses[tensor] == 1 else also
                places[name] = self.out[tensor]
        return StepOutputs(out, also)
