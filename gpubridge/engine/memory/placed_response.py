"""Tensors outside the answering stub's output memory: shared request slots, and placed responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpubridge.engine.memory.device_region import OF_CLIENTS, ON_DEVICE
from gpubridge.request import InferResponse, MemoryRange, Parameters
from gpubridge.transport.signatures import Shapes, Signature


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
    # A view of its own: the segment's own view may be released before this one.
    array: Any = np.frombuffer(segment.view[offset : offset + nbytes], np.uint8)
    array = array.view(_HeldArray)
    array.keep = keep
    return memoryview(array)


class _HeldArray(np.ndarray[Any, Any]):
    """An array with a reference to the owner of its memory; views refer to the array."""

    keep: object


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
