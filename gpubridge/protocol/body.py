"""Lays a request's inputs out in shared memory: where they arrived whenever that is possible."""

from __future__ import annotations

from collections.abc import Sequence

from gpubridge.errors import BridgeError, invalid, unavailable
from gpubridge.host_shm import HostArena, Slot
from gpubridge.protocol.request_form import LENGTH_BYTES, RequestForm
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.bytes_codec import string_fault
from gpubridge.tensor.dtypes import item_size

ALIGNMENT = 64
"""The first tensor after a header starts at a multiple of this."""

_WIDEST = 8


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


def pack_inputs(
    form: RequestForm, binary: memoryview, arena: HostArena
) -> tuple[Slot, list[tuple[int, int]], int]:
    """Put inputs of both kinds, JSON values and binary data, together in a new slot.

    It returns:

    - ``slot``: the caller's to free.
    - ``places``: offset in the slot and size of each input.
    - ``copied``: bytes copied.
    """
    places = []
    end = 0
    for entry in form.sent:
        places.append((end, entry.nbytes))
        end = -(-(end + entry.nbytes) // ALIGNMENT) * ALIGNMENT
    slot = arena.allocate(max(end, 1))
    at = 0
    for entry, (there, nbytes) in zip(form.sent, places, strict=True):
        if entry.data is not None:
            slot.memory[there : there + nbytes] = entry.data
        else:
            slot.memory[there : there + nbytes] = binary[at : at + nbytes]
            at += nbytes
    return slot, places, sum(nbytes for _, nbytes in places)


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
