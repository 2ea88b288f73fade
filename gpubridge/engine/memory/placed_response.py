"""Tensors outside the answering stub's output memory: shared request slots, and placed responses."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

from gpubridge.dataplane import owned_view
from gpubridge.engine.memory.device_region import OF_CLIENTS, ON_DEVICE
from gpubridge.host_shm.request_arena import RequestArena
from gpubridge.request import NO_BYTES, InferResponse, MemoryRange, Parameters
from gpubridge.transport.signatures import Shapes, Signature

_ALIGNMENT = 64
_MAPPED_BYTES = 1 << 16
"""A larger copy has pages of its own."""


class SharedSlot:
    """A slot of several requests, freed with the last reference to this object."""

    __slots__ = ("_free", "slot")

    def __init__(self, free: Callable[[Any], None], slot: Any) -> None:
        self._free = free
        self.slot = slot

    def __del__(self) -> None:
        self._free(self.slot)


def held_bytes(place: MemoryRange) -> memoryview:
    """Return a view of a memory range that keeps the memory from being reused."""
    segment, offset, nbytes, keep = place
    if segment is None:
        return memoryview(b"")
    # Requests that would need this are refused: the server does not read clients' memory.
    assert not isinstance(segment, OF_CLIENTS)
    return owned_view(segment.view[offset : offset + nbytes], keep)


class PlacedResponse(InferResponse):
    """A response whose outputs lie in the memory of several stubs, or in inputs of its request.

    - ``parts``: the memory range of each output.
    - ``shared``: outputs that other requests may still read.
    """

    __slots__ = ("parts", "shared")

    def __init__(
        self,
        signature: Signature,
        shapes: Shapes,
        buffers: list[memoryview],
        parameters: Parameters | None,
        parts: Sequence[MemoryRange],
        shared: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(signature, shapes, buffers, parameters)
        self.parts = parts
        self.shared = shared

    def ranges(self) -> list[MemoryRange]:
        """Return the memory ranges of the outputs."""
        return list(self.parts)

    def visible(self) -> list[memoryview | None]:
        """Return the buffers of the outputs; None for an output on a device."""
        return [
            None if isinstance(part.segment, ON_DEVICE) else buffer
            for part, buffer in zip(self.parts, self.buffers, strict=True)
        ]


def is_in_host_memory(response: InferResponse) -> bool:
    """Return whether all outputs are complete, and in memory that the server can read."""
    return response.event is None and None not in response.visible()


def private_response(response: InferResponse) -> PlacedResponse:
    """Return a copy of a response in private memory, which is in no place that a stub maps."""
    memory = _private_memory(sum(map(len, response.buffers)))
    buffers, at = [], 0
    for buffer in response.buffers:
        end = at + len(buffer)
        memory[at:end] = buffer
        buffers.append(memory[at:end])
        at = end
    shapes = tuple(tuple(shape) for shape in response.shapes)
    parts = [NO_BYTES] * len(buffers)
    return PlacedResponse(response.signature, shapes, buffers, response.parameters, parts)


def placed_response(response: PlacedResponse, arena: RequestArena) -> PlacedResponse:
    """Return a response whose outputs are copied to the memory of the model that reads them.

    Raises BridgeError: UNAVAILABLE when the arena is at its limit.
    """
    sizes = [-(-len(buffer) // _ALIGNMENT) * _ALIGNMENT for buffer in response.buffers]
    slot = arena.allocate(sum(sizes) or 1)
    held = SharedSlot(arena.free, slot)
    parts, at = [], 0
    for buffer, size in zip(response.buffers, sizes, strict=True):
        nbytes = len(buffer)
        slot.memory[at : at + nbytes] = buffer
        place = MemoryRange(slot.segment, slot.offset + at, nbytes, held)
        parts.append(place if nbytes else NO_BYTES)
        at += size
    return PlacedResponse(
        response.signature, response.shapes, list(response.buffers), response.parameters, parts
    )


def _private_memory(nbytes: int) -> memoryview:
    """Return private memory; where it is large, its pages return to the system with it."""
    return memoryview(mmap.mmap(-1, nbytes) if nbytes > _MAPPED_BYTES else bytearray(nbytes))
