"""Alignment of a request's inputs by as few moves as possible, without damage."""

import json
import struct
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.host_shm import HostArena
from gpubridge.protocol.body import (
    ALIGNMENT,
    align_inputs,
    body_slot_size,
    check_strings,
    input_copy,
)
from gpubridge.protocol.infer_request import parse_request
from gpubridge.tensor.datatypes import DATATYPES, item_size
from tests.unit.model_configs import model_config

NAMES = list("ABCDEFGH")
FIXED = [name for name in DATATYPES if name != "BYTES"]


def request(tensors, as_json=()):
    """A form of tensors (datatype, element count), and the bytes that follow its header."""
    kinds = {"BYTES": "STRING"}
    config = model_config(
        ";".join(
            f"{name} {kinds.get(kind, kind)} [-1]"
            for name, (kind, _) in zip(NAMES, tensors, strict=False)
        )
    )
    inputs, data = [], []
    for index, (name, (kind, count)) in enumerate(zip(NAMES, tensors, strict=False)):
        entry = {"name": name, "datatype": kind, "shape": [count]}
        if index in as_json:
            entry["data"] = [index] * count
            data.append(b"")
        else:
            if kind == "BYTES":
                raw = b"".join(struct.pack("<I", n % 5) + b"s" * (n % 5) for n in range(count))
            else:
                raw = bytes((index * 50 + n) % 256 for n in range(count * item_size(kind)))
            entry["parameters"] = {"binary_data_size": len(raw)}
            data.append(raw)
        inputs.append(entry)
    header = json.dumps({"inputs": inputs}).encode()
    return parse_request(header, config, sum(map(len, data))), data


TENSORS = st.lists(
    st.tuples(st.sampled_from([*FIXED, "BYTES", "UINT8", "FP64"]), st.integers(0, 30)),
    min_size=1,
    max_size=8,
)


@given(TENSORS, st.integers(0, 3))
def test_every_input_is_aligned_and_whole(tensors, lines):
    form, data = request(tensors)
    body = b"".join(data)
    start = lines * ALIGNMENT
    memory = memoryview(bytearray(start + body_slot_size(len(body), len(tensors))))
    memory[start : start + len(body)] = body
    places, copied = align_inputs(form, memory, start)
    moved = 0
    for (kind, _), (at, nbytes), was, raw in zip(tensors, places, form.places, data, strict=True):
        assert bytes(memory[start + at : start + at + nbytes]) == raw
        assert (start + at) % (item_size(kind) or 1) == 0
        assert at >= was[0]
        moved += nbytes if at != was[0] else 0
    assert copied == moved
    ends = [at + nbytes for at, nbytes in places]
    assert all(end <= at for end, (at, _) in zip(ends, places[1:], strict=False))
    if form.aligned:
        assert copied == 0


def test_only_what_is_misaligned_moves():
    form, data = request([("UINT8", 3), ("FP32", 10), ("FP64", 2), ("UINT8", 5)])
    body = b"".join(data)
    memory = memoryview(bytearray(body_slot_size(len(body), 4)))
    memory[: len(body)] = body
    places, copied = align_inputs(form, memory, 0)
    assert [at for at, _ in places] == [0, 4, 48, 64]
    assert copied == 40 + 16 + 5
    form, data = request([("FP64", 2), ("FP32", 3), ("INT16", 1), ("UINT8", 5)])
    assert align_inputs(form, memory, 0) == (form.places, 0)


@given(TENSORS, st.sets(st.integers(0, 7)))
def test_inputs_of_both_kinds_are_packed_apart_and_aligned(tensors, chosen):
    numbers = [
        ("INT32", count) if i in chosen else (kind, count)
        for i, (kind, count) in enumerate(tensors)
    ]
    form, data = request(numbers, chosen)
    arena = HostArena(1, 1 << 20)
    try:
        packed = input_copy(form, memoryview(b"".join(data)), arena).run()
        slot, places, copied = packed.slot, packed.places, packed.copied
        for index, ((at, nbytes), entry) in enumerate(zip(places, form.inputs, strict=True)):
            assert at % ALIGNMENT == 0
            expected = entry.data if index in chosen else data[index]
            assert bytes(slot.memory[at : at + nbytes]) == expected
        assert copied == sum(nbytes for _, nbytes in places)
        assert all(at + nbytes <= following for (at, nbytes), (following, _) in pairwise(places))
    finally:
        arena.close()


def strings(*items):
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def check(data, count):
    form, _ = request([("BYTES", count)])
    check_strings(form, "m", [memoryview(data)])


def test_a_wrong_number_of_very_many_strings_is_not_counted_to_the_end():
    with pytest.raises(BridgeError, match=r"expected 300000 string elements .* the first 100000 "):
        check(bytes(4 * 299_999), 300_000)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_strings_or_an_error(data, count):
    try:
        check(data, count)
    except BridgeError:
        return
    found, at = 0, 0
    while at < len(data):
        at += 4 + struct.unpack_from("<I", data, at)[0]
        found += 1
    assert (found, at) == (count, len(data))
