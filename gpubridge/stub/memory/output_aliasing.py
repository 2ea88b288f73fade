"""Outputs that lie in an input of their request: sent by reference instead of being copied.

A model that returns an input, or a part of it, causes no cost that grows with the size. This is safe
only if nothing in this process can write to that memory any more: when, after the response is
deleted, the lease of the request's memory has ended. If the model keeps any view, the output is
copied.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpubridge.pb_utils import Tensor
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor.native import native
from gpubridge.transport.context import RequestContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.records import Record

_SERVER = 0


def is_worthwhile(record: Record) -> bool:
    """Return whether a request has a large enough input in memory that outputs may alias.

    Client memory and shared inputs are excluded, since the receiver of an output may write to it.
    """
    for ref in record.refs:
        if ref[2] >= LIMITS.passed_on_bytes and ref[0] >> 32 == _SERVER:
            context: RequestContext = record.context
            return not context.shared and context.client is None
    return False


class OutputAliasing:
    """Finds outputs in ``borrowed`` memory; all others are copied to ``outputs``."""

    def __init__(self, outputs: OutputMemory, borrowed: BorrowedMemory) -> None:
        self._outputs = outputs
        self._borrowed = borrowed
        compiled = native()
        self._offset = _offset_within if compiled is None else compiled.offset_within

    def place(
        self, record: Record, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Any], Sequence[int]] | None:
        """Copy the outputs that alias no input; return None if no output does.

        Returns: the location in the request's memory of each aliasing output, None for each copied
        one, and the reference fields of the copied ones.
        """
        inputs = _inputs_of(record)
        places = [self._place(record.ticket, inputs, tensor) for tensor in tensors]
        found = [place for place in places if place is not None]
        if not found or (len(found) > 1 and _overlap(found)):
            return None
        if len(found) == len(places):
            return places, ()
        others = [tensor._payload() for tensor, place in zip(tensors, places) if place is None]
        return places, self._outputs.place(others, record.context.outputs_for)

    def finish(
        self, places: Sequence[Any], fields: Sequence[int], consumer: str, lent: memoryview
    ) -> tuple[list[int], bool]:
        """Return the fields of all references, and whether they alias the request's memory.

        Call it with the result of `place` once this process has no reference to the response.
        """
        found = [place for place in places if place is not None]
        # A view that still exists may be written to, and keeps the memory lent while it is copied.
        free = not lent[found[0][3]]
        passed = itertools.chain.from_iterable(found) if free else self._copied(found, consumer)
        left, there = iter(fields), iter(passed)
        return [
            field
            for place in places
            for field in itertools.islice(left if place is None else there, 4)
        ], free

    def _copied(self, places: Sequence[Any], consumer: str) -> list[int]:
        segment = self._borrowed.segment
        views = [segment(region).view[at : at + nbytes] for region, at, nbytes, _ in places]
        return self._outputs.place(views, consumer)

    def _place(
        self, ticket: int, inputs: dict[int, _Inputs], tensor: Tensor
    ) -> tuple[int, int, int, int] | None:
        """Return the location of a large tensor in its request's memory, or None."""
        if tensor._datatype == "BYTES" or tensor._device_bytes is not None:
            return None
        payload = tensor._payload()
        nbytes = payload.nbytes
        if nbytes < LIMITS.passed_on_bytes:
            return None
        for region, there in inputs.items():
            at = self._offset(self._borrowed.segment(region).view, payload)
            if at >= 0 and there.contains(at, nbytes):
                return region, at, nbytes, ticket
        return None


class _Inputs:
    """Byte ranges of the large inputs of a request in one region."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        spans.sort()
        self._starts = [start for start, _ in spans]
        # The furthest end of all inputs that begin up to there: inputs may overlap.
        self._ends = list(itertools.accumulate((end for _, end in spans), max))

    def contains(self, at: int, nbytes: int) -> bool:
        """Return whether a byte range lies within one input."""
        before = bisect_right(self._starts, at)
        return before > 0 and at + nbytes <= self._ends[before - 1]


def _inputs_of(record: Record) -> dict[int, _Inputs]:
    """Return the large inputs in the request's own memory, by region."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for region, offset, nbytes, lease in record.refs:
        if nbytes >= LIMITS.passed_on_bytes and region >> 32 == _SERVER and lease == record.ticket:
            spans.setdefault(region, []).append((offset, offset + nbytes))
    return {region: _Inputs(each) for region, each in spans.items()}


def _overlap(places: list[tuple[int, int, int, int]]) -> bool:
    """Return whether any two locations overlap: a receiver of one may write to the other."""
    places.sort()
    return any(a[1] + a[2] > b[1] and a[0] == b[0] for a, b in zip(places, places[1:]))


def _offset_within(memory: memoryview, buffer: Any) -> int:
    """Return the offset of a buffer within memory, or -1; as the compiled `offset_within`."""
    at = _address(buffer) - _address(memory)
    return at if 0 <= at <= memory.nbytes - buffer.nbytes else -1


def _address(buffer: Any) -> int:
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address
