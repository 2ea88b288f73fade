"""Lays a request's inputs out in shared memory: where they arrived whenever that is possible."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import HostArena
from gpubridge.protocol.request_form import LENGTH_BYTES, RequestForm
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.bytes_codec import string_fault
from gpubridge.tensor.dtypes import item_size

ALIGNMENT = 64
"""The first tensor after a header starts at a multiple of this."""

LONG_STRINGS = 32 << 20
"""Checking more bytes of strings than this takes long: it is a worker's. The compiled module knows, too."""

_WIDEST = 8
_PIECE = 1 << 20


def body_room(nbytes: int, inputs: int) -> int:
    """Return the bytes of the slot that a body needs: with room to align every later tensor."""
    return ALIGNMENT + nbytes + _WIDEST * inputs


def write_length(memory: memoryview, start: int, nbytes: int) -> None:
    """Make a body of ``nbytes`` at ``start`` one BYTES element, by its length before it."""
    memory[start - LENGTH_BYTES : start] = nbytes.to_bytes(LENGTH_BYTES, "little")


def align_inputs(
    form: RequestForm, memory: memoryview, start: int
) -> tuple[Sequence[tuple[int, int]], int]:
    """Make every input that follows the header start at a multiple of its item size.

    - ``memory``: the slot; changed in place where an input must move.
    - ``start``: offset of the first byte after the header.

    It returns:

    - ``places``: offset from ``start`` and size of each input.
    - ``copied``: bytes that had to be moved.
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
                "the model changed while the request was received, which has more inputs than the "
                "one before; send the request again"
            )
        if there != here and nbytes:
            moves.append((here, there, nbytes))
        places.append((there - start, nbytes))
        end = there + nbytes
    # From the last on: each moves up, into room that the one after it has left.
    for here, there, nbytes in reversed(moves):
        memory[there : there + nbytes] = memory[here : here + nbytes]
    return places, sum(nbytes for _, _, nbytes in moves)


Places = Sequence[tuple[int, int]]
"""Offset and size of each input that is sent."""


def packed_places(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the places of inputs of these sizes in a slot of their own: each is aligned."""
    places = []
    end = 0
    for nbytes in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((begin, nbytes))
        end = begin + nbytes
    return tuple(places)


class InputCopy:
    """Puts the inputs of a request together in a slot of their own; owns that until it is given away.

    - ``places``: where in the slot each belongs.
    - ``sources``: the data of each.
    - ``slot``: the caller's, from the end of `run` on.

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
        """Copy a piece in each turn of the event loop; cancelled, it frees the slot."""
        try:
            for _ in self._pieces():
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.free()
            raise
        return self

    def free(self) -> None:
        """Give the slot back."""
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
    """Return what puts inputs of both kinds, JSON values and binary data, together in a new slot."""
    sources: list[bytes | memoryview] = []
    at = 0
    for entry in form.sent:
        if entry.data is not None:
            sources.append(entry.data)
        else:
            sources.append(binary[at : at + entry.nbytes])
            at += entry.nbytes
    return InputCopy(packed_places([entry.nbytes for entry in form.sent]), sources, arena)


def check_strings(form: RequestForm, model: str, data: Sequence[memoryview]) -> None:
    """Check that the BYTES inputs are the strings that their shapes announce.

    ``data``: the bytes of every input.

    Raises BridgeError: INVALID_ARG in Triton's words.
    """
    for index, count in form.strings:
        buffer = data[index]
        try:
            bytes_codec.validate(buffer, count)
        except BridgeError as error:
            name = form.sent[index].name
            fault = string_fault(form.identifier, name, model, buffer, count)
            raise invalid(fault) from error
