"""Layout of a request's inputs in shared memory, in place whenever possible."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import HostArena
from gpubridge.model_io import InputForm
from gpubridge.protocol.request_form import LENGTH_BYTES, RequestForm
from gpubridge.tensor import strings
from gpubridge.tensor.datatypes import element_count, item_size
from gpubridge.tensor.strings import string_fault

ALIGNMENT = 64
"""Alignment of the first tensor after a header."""

LONG_STRINGS = 32 << 20
"""Bytes of strings above which a worker checks them; the compiled module has the same limit."""

_WIDEST = 8
_PIECE = 1 << 20


def body_slot_size(nbytes: int, inputs: int) -> int:
    """Return the size of the slot for a body, with padding to align every tensor."""
    return ALIGNMENT + nbytes + _WIDEST * inputs


def write_length(memory: memoryview, start: int, nbytes: int) -> None:
    """Write the length before a body of ``nbytes`` at ``start``, which makes it one BYTES element."""
    memory[start - LENGTH_BYTES : start] = nbytes.to_bytes(LENGTH_BYTES, "little")


def align_inputs(
    form: RequestForm, memory: memoryview, start: int
) -> tuple[Sequence[tuple[int, int]], int]:
    """Move inputs after the header so that each starts at a multiple of its item size.

    - ``memory``: the slot, changed in place.
    - ``start``: offset of the first byte after the header.

    Returns the places of the inputs, offset from ``start`` and size of each, and the bytes moved.
    """
    if form.aligned:
        return form.places, 0
    places: list[tuple[int, int]] = []
    moves: list[tuple[int, int, int]] = []
    end = 0
    for entry, (at, nbytes) in zip(form.sent, form.places, strict=True):
        here = start + at
        size = item_size(entry.datatype) or 1
        there = -(-max(here, end) // size) * size
        if there + nbytes > len(memory):
            raise unavailable(
                "the model was replaced by one with more inputs while the request was received; "
                "send the request again"
            )
        if there != here and nbytes:
            moves.append((here, there, nbytes))
        places.append((there - start, nbytes))
        end = there + nbytes
    # In reverse order, because every input moves to a higher offset.
    for here, there, nbytes in reversed(moves):
        memory[there : there + nbytes] = memory[here : here + nbytes]
    return places, sum(nbytes for _, _, nbytes in moves)


Places = Sequence[tuple[int, int]]
"""Offset and size of each input that is sent."""


def packed_places(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return aligned places for inputs of these sizes in a slot of their own."""
    places = []
    end = 0
    for nbytes in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((begin, nbytes))
        end = begin + nbytes
    return tuple(places)


class InputCopy:
    """Copies the inputs of a request into a new slot; owns the slot until the copy has finished.

    - ``places``: offset and size of each input in the slot.
    - ``sources``: the data of each input.
    - ``slot``: belongs to the caller after `run`.

    Raises BridgeError: UNAVAILABLE when the arena is at its limit.
    """

    def __init__(
        self, places: Places, sources: Sequence[bytes | memoryview], arena: HostArena
    ) -> None:
        self.places = places
        self.copied = sum(nbytes for _, nbytes in places)
        self.slot = arena.allocate(sum(places[-1]) or 1 if places else 1)
        self._sources = sources
        self._arena = arena

    def run(self) -> InputCopy:
        """Copy all at once."""
        for _ in self._pieces():
            pass
        return self

    async def run_in_turns(self) -> InputCopy:
        """Copy one piece in each turn of the event loop; frees the slot if cancelled."""
        try:
            for _ in self._pieces():
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.free()
            raise
        return self

    def free(self) -> None:
        """Free the slot."""
        self._arena.free(self.slot)

    def _pieces(self) -> Iterator[None]:
        there = self.slot.memory
        for (start, nbytes), source in zip(self.places, self._sources, strict=True):
            data = memoryview(source)
            for at in range(0, nbytes, _PIECE):
                end = min(at + _PIECE, nbytes)
                there[start + at : start + end] = data[at:end]
                yield


def input_copy(form: RequestForm, binary: memoryview, arena: HostArena) -> InputCopy:
    """Return the copy of all inputs, parsed JSON values and binary data, into a new slot."""
    sources: list[bytes | memoryview] = []
    at = 0
    for entry in form.sent:
        if entry.data is not None:
            sources.append(entry.data)
        else:
            sources.append(binary[at : at + entry.nbytes])
            at += entry.nbytes
    return InputCopy(packed_places([entry.nbytes for entry in form.sent]), sources, arena)


def check_json_strings(identifier: str, inputs: Sequence[InputForm], model: str) -> None:
    """Check that inputs whose strings came as JSON have as many as their shapes say.

    Raises BridgeError: INVALID_ARG with Triton's text.
    """
    for entry in inputs:
        if entry.miscounted and entry.data is not None:
            count = element_count(entry.shape)
            fault = string_fault(identifier, entry.name, model, memoryview(entry.data), count)
            raise invalid(fault)


def check_strings(form: RequestForm, model: str, data: Sequence[memoryview]) -> None:
    """Check that the BYTES inputs have as many well-formed strings as their shapes say.

    ``data``: the bytes of every input.

    Raises BridgeError: INVALID_ARG with Triton's text.
    """
    for index, count in form.strings:
        buffer = data[index]
        try:
            strings.validate(buffer, count)
        except BridgeError as error:
            name = form.sent[index].name
            fault = string_fault(form.identifier, name, model, buffer, count)
            raise invalid(fault) from error
