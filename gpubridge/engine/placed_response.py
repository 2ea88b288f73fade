"""Answers whose outputs do not all lie in the output memory of the one stub that answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpubridge.engine.devices.region import OF_CLIENTS, ON_DEVICE
from gpubridge.request import InferResponse, MemoryRange, Parameters
from gpubridge.transport.signatures import Shapes, Signature


def held_bytes(place: MemoryRange) -> memoryview:
    """Return the bytes of a place; the memory stays what it is as long as a view of them exists."""
    segment, offset, nbytes, keep = place
    if segment is None:
        return memoryview(b"")
    # Such a request has been refused: the server does not look at clients' memory.
    assert not isinstance(segment, OF_CLIENTS)
    # Of a view of its own: the segment's must be free to go before this one.
    array: Any = np.frombuffer(segment.view[offset : offset + nbytes], np.uint8)
    array = array.view(_HeldArray)
    array.keep = keep
    return memoryview(array)


class _HeldArray(np.ndarray[Any, Any]):
    """Bytes that own what keeps them in place: views of them refer to this object."""

    keep: object


class PlacedResponse(InferResponse):
    """An answer whose outputs lie anywhere: in the memory of several stubs, or its request's own.

    ``shared``: the outputs that others may still look at.
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
        """Return where the outputs lie."""
        return list(self.parts)

    def visible(self) -> list[memoryview | None]:
        """Return the buffers of the outputs; None for those that are on a device."""
        return [
            None if isinstance(part.segment, ON_DEVICE) else buffer
            for part, buffer in zip(self.parts, self.buffers, strict=True)
        ]
