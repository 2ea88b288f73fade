"""Large requests in pieces: every split gives the same request, in place and within bounds."""

import pytest
from hypothesis import given, strategies as st

from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Account, Body, Budget
from gpubridge.protocol.grpc.receiver import RequestReceiver
from tests.unit.grpc_requests import Model, Request, cache, inputs_of, raw
from tests.unit.model_configs import model_config

MODEL = Model(model_config("A UINT8 [-1];B FP32 [-1];S STRING [1] optional: true"))
REQUEST = raw(
    ("A", "UINT8", [7], b"0123456"),
    ("B", "FP32", [2], b"abcdefgh"),
    ("S", "BYTES", [1], b"\2\0\0\0hi"),
    id="ident",
)
MESSAGE = REQUEST.SerializeToString()


def new_arena(name="m"):
    return Regions(1 << 24).arena(name)


def new_body():
    """Make what a message is charged to, of a connection of its own."""
    return Body(Budget(1 << 24), Account(lambda: 0), lambda _: None)


@pytest.fixture
def arena():
    arena = new_arena()
    yield arena
    assert arena.lent() == (0, 0)
    arena.close()


def feed(receiver, pieces):
    for piece in pieces:
        receiver.feed(memoryview(piece))


def finish(receiver, arena):
    """Make the request; returns its data, whether each is aligned, and what was copied."""
    assert receiver.complete
    try:
        _, request, _ = receiver.request(cache(MODEL, arena), lambda _: None)
    finally:
        receiver.close()
    result = inputs_of(request), [at % 64 for at, _ in request.places], request.copied
    assert request.identifier == "ident"
    arena.free(request.slot)
    return result


@given(st.lists(st.integers(1, 40), min_size=1))
def test_any_pieces_of_any_order_of_fields(sizes):
    # The raw contents before everything else: nothing is known then of where they belong.
    head = Request()
    head.CopyFrom(REQUEST)
    del head.raw_input_contents[:]
    message = (
        Request(raw_input_contents=REQUEST.raw_input_contents).SerializeToString()
        + b"\xa3\x06\x3a\x01x\xa4\x06"
        + head.SerializeToString()
    )
    arena = new_arena()
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    at = 0
    while at < len(message):
        size = sizes[at % len(sizes)]
        receiver.feed(memoryview(message)[at : at + size])
        at += size
    inputs, alignments, _ = finish(receiver, arena)
    assert inputs == list(REQUEST.raw_input_contents)
    assert alignments == [0, 0, 0]
    assert arena.lent() == (0, 0)
    arena.close()


def test_raw_contents_are_received_where_they_stay(arena):
    data = [bytes(range(256)) * 400, b"\x01\x02\x03\x04" * 30_000]
    request = raw(
        ("A", "UINT8", [len(data[0])], data[0]),
        ("B", "FP32", [len(data[1]) // 4], data[1]),
        id="ident",
    )
    message = memoryview(request.SerializeToString())
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    receiver.feed(message[:1000])
    begun = receiver.copied
    assert 0 < begun < 1000
    at = 1000
    targets = 0
    while not receiver.complete:
        target = receiver.target
        if target is None:
            receiver.feed(message[at : at + 1])
            at += 1
        else:
            target[:] = message[at : at + len(target)]
            at += len(target)
            targets += 1
            receiver.filled()
    assert targets == 2
    assert finish(receiver, arena) == (data, [0, 0], begun)


def test_unexpected_raw_contents_fill_the_slot_without_gaps(arena):
    # 4096 bytes are left when the first raw content begins, and no input is known yet: the
    # slot has no space to align the second.
    head = Request(model_name="m", id="ident")
    head.inputs.add(name="A", datatype="UINT8", shape=[7])
    head.inputs.add(name="B", datatype="FP32", shape=[1000])
    rest = head.SerializeToString()
    rest += b"\xa2\x06" + bytes([4096 - 7 - 3 - 4000 - len(rest) - 3]) + bytes(1000)
    rest = rest[: 4096 - 7 - 3 - 4000]
    raws = [b"0123456", bytes(range(250)) * 16]
    message = Request(raw_input_contents=raws).SerializeToString() + rest
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    receiver.feed(memoryview(message))
    assert finish(receiver, arena) == (raws, [0, 0], 2 * 4007)


def test_typed_contents_of_any_size(arena):
    request = Request(model_name="m", id="ident")
    entry = request.inputs.add(name="A", datatype="UINT8", shape=[50_000])
    entry.contents.uint_contents.extend(i % 256 for i in range(50_000))
    entry = request.inputs.add(name="B", datatype="FP32", shape=[1])
    entry.contents.fp32_contents.append(0)
    message = request.SerializeToString()
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    feed(receiver, [message[i : i + 999] for i in range(0, len(message), 999)])
    inputs, _, copied = finish(receiver, arena)
    assert inputs == [(bytes(range(256)) * 196)[:50_000], bytes(4)]
    assert copied == 50_004


@given(st.data())
def test_mutated_bytes_never_take_more_than_the_message(data):
    message = bytearray(MESSAGE)
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    arena = new_arena()
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    cut = data.draw(st.integers(0, len(message)))
    try:
        feed(receiver, [bytes(message[:cut]), bytes(message[cut:])])
        assert arena.lent()[1] <= max(4096, 2 * (len(message) + 64 * len(REQUEST.inputs)))
        _, request, _ = receiver.request(cache(MODEL, arena), lambda _: None)
        arena.free(request.slot)
    except BridgeError:
        pass
    receiver.close()
    assert arena.lent() == (0, 0)
    arena.close()


def test_contents_that_come_before_the_name_of_their_model_are_private_until_then(arena):
    head = Request()
    head.CopyFrom(REQUEST)
    del head.raw_input_contents[:]
    contents = Request(raw_input_contents=REQUEST.raw_input_contents).SerializeToString()
    message = memoryview(contents + head.SerializeToString())
    receiver = RequestReceiver(len(message), lambda _: arena, new_body())
    receiver.feed(message[: len(contents)])
    assert arena.lent() == (0, 0)
    receiver.feed(message[len(contents) :])
    inputs, _, copied = finish(receiver, arena)
    assert inputs == list(REQUEST.raw_input_contents)
    # Received, and then copied to the arena.
    assert copied == 42


def test_contents_for_another_model_than_was_named_first_move_to_its_memory(arena):
    other = new_arena("other")
    message = memoryview(b"\x0a\x05other" + MESSAGE)
    receiver = RequestReceiver(
        len(message), lambda name: other if name == "other" else arena, new_body()
    )
    feed(receiver, [message])
    assert (other.lent()[0], arena.lent()[0]) == (1, 0)
    inputs, _, copied = finish(receiver, arena)
    assert inputs == list(REQUEST.raw_input_contents)
    assert copied == 42
    assert other.lent() == (0, 0)
    other.close()


def test_contents_before_the_models_name_take_no_models_memory():
    receiver = RequestReceiver(len(MESSAGE), lambda _: None, new_body())
    receiver.feed(memoryview(MESSAGE))
    receiver.close()
