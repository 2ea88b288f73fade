"""Whatever comes as gRPC: each call ends once with a status, nothing escapes, and all memory goes back."""

import asyncio
import gzip

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Account, Body, Budget
from gpubridge.protocol.grpc.receiver import RequestReceiver, whole_request
from gpubridge.schema import message_class
from tests.fuzz.budget import fuzzed, mutations, splits
from tests.fuzz.grpc_endpoint import CONFIG, PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import Model, Request, cache, inputs_of, raw

STATUSES = {0, 3, 5, 8, 12, 13, 14}
"""OK; invalid, unknown, too large, not served, no message at all, no room: never UNKNOWN (2)."""
Response = message_class("ModelInferResponse")

_DIMS = st.sampled_from([0, 1, 2, 4, -1, 1 << 40, (1 << 63) - 1])
_NAMES = st.sampled_from(["A", "S", "OUT", "", "B"])
_TYPES = st.sampled_from(["FP32", "FP32", "BYTES", "INT8", "FP16", "", "X"])


@st.composite
def _parameters(draw, there):
    names = ["sequence_id", "sequence_start", "timeout", "priority", "triton_x", "any"]
    names += ["classification", "shared_memory_region", "shared_memory_byte_size", "binary_data"]
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        field, value = draw(
            st.sampled_from(
                [
                    ("int64_param", -1),
                    ("int64_param", (1 << 63) - 1),
                    ("uint64_param", (1 << 64) - 1),
                    ("bool_param", True),
                    ("string_param", "x"),
                    ("double_param", float("nan")),
                ]
            )
        )
        setattr(there[name], field, value)


@st.composite
def requests(draw, model="m"):
    """Requests of which many are right and all are messages."""
    request = Request(model_name=draw(st.sampled_from([model] * 5 + ["x", ""])))
    request.id = draw(st.sampled_from(["", "7", "é" * 80]))
    right = draw(st.booleans())
    if right:
        count = draw(st.sampled_from([0, 1, 4, 30_000]))
        request.inputs.add(name="A", datatype="FP32", shape=[count])
        request.raw_input_contents.append(b"abcd" * count)
        if draw(st.booleans()):
            request.inputs.add(name="S", datatype="BYTES", shape=[1])
            request.raw_input_contents.append(b"\3\0\0\0abc")
    else:
        for _ in range(draw(st.integers(0, 3))):
            entry = request.inputs.add(name=draw(_NAMES), datatype=draw(_TYPES))
            entry.shape.extend(draw(st.lists(_DIMS, max_size=3)))
            if draw(st.booleans()):
                entry.contents.fp32_contents.extend(draw(st.lists(st.just(1.5), max_size=4)))
                entry.contents.bytes_contents.extend(draw(st.lists(st.binary(), max_size=2)))
            draw(_parameters(entry.parameters))
        request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=3)))
        for _ in range(draw(st.integers(0, 2))):
            draw(_parameters(request.outputs.add(name=draw(_NAMES)).parameters))
        draw(_parameters(request.parameters))
    return request.SerializeToString()


MESSAGES = st.one_of(requests(), mutations(requests()), mutations(requests(), 1), st.binary())


def new_body():
    return Body(Budget(1 << 24), Account(lambda: 0), lambda _: None)


@fuzzed(3)
@given(st.data())
def test_a_message_is_read_the_same_whole_and_in_pieces(data):
    sent = data.draw(MESSAGES)
    arena = Regions(1 << 24).arena("m")
    try:
        forms = cache(Model(CONFIG), arena)
        ends = []
        for _ in range(2):
            # Twice: the second meets the form that the first has left.
            try:
                _, made, _ = whole_request(sent, forms, lambda _: None)
            except BridgeError as error:
                ends.append((error.code, error.message))
            else:
                ends.append(
                    (made.identifier, made.signature, made.dims, made.context, inputs_of(made))
                )
                arena.free(made.slot)
        assert ends[0] == ends[1]
        assert arena.lent() == (0, 0)
        try:
            receiver = RequestReceiver(len(sent), lambda _: arena, new_body())
            try:
                for piece in data.draw(splits(sent)):
                    receiver.feed(memoryview(piece))
                _, made, _ = receiver.request(forms, lambda _: None)
            finally:
                receiver.close()
        except BridgeError as error:
            ends.append((error.code, error.message))
        else:
            ends.append((made.identifier, made.signature, made.dims, made.context, inputs_of(made)))
            arena.free(made.slot)
        assert ends[0] == ends[2]
        assert arena.lent() == (0, 0)
    finally:
        arena.close()


def test_each_of_several_ids_has_to_be_text():
    for size in (1, 200):
        # The second is the one that counts; the first begins before, or behind, a short length.
        sent = b"\x1a" + (b"\1" if size == 1 else b"\xc8\1") + b"\xff" * size + b"\x1a\0"
        receiver = RequestReceiver(len(sent), lambda _: None, new_body())
        with pytest.raises(BridgeError, match="parse"):
            receiver.feed(memoryview(sent))


_IDS = st.sampled_from([1, 3, 5, 0, 2, 7])
_DATA = st.one_of(
    st.builds(message, MESSAGES),
    st.builds(message, requests("d")),
    st.builds(lambda data: message(gzip.compress(data), 1), requests()),
    st.builds(message, MESSAGES, st.integers(0, 2), st.integers(0, 1 << 21)),
    st.integers(0, 3000).map(lambda count: message(b"") * count),
)
_METHODS = st.sampled_from(["ModelInfer", "ModelStreamInfer", "ModelStreamInfer", "None"])
_FIELDS = st.lists(
    st.sampled_from(
        [
            ("grpc-encoding", "gzip"),
            ("grpc-timeout", "1H"),
            ("grpc-timeout", "1x"),
            ("triton_grpc_error", "true"),
            ("content-length", "10"),
        ]
    ),
    max_size=2,
)


@st.composite
def _frames(draw):
    kind = draw(st.sampled_from(["head", "data", "data", "data", "other"]))
    stream_id = draw(_IDS)
    if kind == "head":
        return head(stream_id, draw(_METHODS), *draw(_FIELDS), end=draw(st.booleans()))
    if kind == "other":
        return frame(
            draw(st.integers(0, 10)),
            draw(st.sampled_from([0, 1, 4, 5, 8, 0x20, 255])),
            stream_id,
            draw(st.one_of(st.binary(max_size=20), st.sampled_from([b"\0\0\0\1", b"\0" * 8]))),
        )
    return frame(0, draw(st.sampled_from([0, 0, 1])), stream_id, draw(_DATA))


_CALLS = st.builds(
    lambda method, fields, data, end: (
        head(1, method, *fields) + b"".join(frame(0, 0, 1, part) for part in data) + end
    ),
    _METHODS,
    _FIELDS,
    st.lists(_DATA, max_size=3),
    st.sampled_from([frame(0, 1, 1), b"", frame(3, 0, 1, b"\0\0\0\10")]),
)
_TRAFFIC = st.one_of(
    _CALLS,
    mutations(_CALLS, 3),
    st.lists(_frames(), max_size=8).map(b"".join),
    st.binary(max_size=200),
)


def _proper(endpoint):
    for stream_id, statuses in endpoint.statuses().items():
        assert stream_id % 2
        assert len(statuses) == 1
        assert statuses[0] in STATUSES


async def _ask(neighbour, endpoint):
    """Have another client ask what is right, and get the right data."""
    sent = raw(("A", "FP32", [2], b"goodbad!")).SerializeToString()
    neighbour.receive(PREFACE + head(1, "ModelInfer") + frame(0, 1, 1, message(sent)))
    await endpoint.settle()
    assert neighbour.statuses() == {1: [0]}
    answer = Response.FromString(neighbour.data(1)[5:])
    assert list(answer.raw_output_contents) == [b"good"]


TURNS = 60
"""Turns of the event loop in which a connection takes thousands of messages."""


async def _converse(pieces, deferred, ends=False):
    """Have a connection take bytes, answer what it will, and go; nothing may be left of it."""
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
    endpoint = GrpcEndpoint(deferred=deferred)
    neighbour = GrpcEndpoint(beside=endpoint)
    endpoint.receive(PREFACE)
    for piece in pieces:
        endpoint.receive(piece)
        await asyncio.sleep(0)
    if ends:
        endpoint.end()
    await endpoint.settle(TURNS)
    _proper(endpoint)
    # Requests and windows of a client that sends no more are not waited for.
    assert not ends or endpoint.closed
    endpoint.lose()
    await endpoint.settle(TURNS)
    assert not failures
    assert endpoint.connections == {neighbour.connection}
    assert endpoint.regions.lent() == (0, 0)
    await _ask(neighbour, endpoint)
    neighbour.lose()
    assert not endpoint.connections
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    return endpoint


@fuzzed(3)
@given(st.data(), st.booleans(), st.booleans())
def test_no_traffic_of_a_connection_escapes_or_leaves_anything(data, deferred, ends):
    """`_converse` asserts what must hold during the connection and after it."""
    pieces = data.draw(splits(data.draw(_TRAFFIC)))
    asyncio.run(_converse(pieces, deferred, ends))


@fuzzed(0.5)
@given(st.lists(st.tuples(requests(), st.sampled_from(["m", "d"])), min_size=1, max_size=5))
def test_whole_calls_each_get_one_status(sent):
    ids = range(1, 2 * len(sent), 2)
    traffic = [
        head(stream_id, method) + frame(0, 1, stream_id, message(data))
        for stream_id, (data, name) in zip(ids, sent, strict=True)
        for method in ["ModelInfer" if name == "m" else "ModelStreamInfer"]
    ]
    endpoint = asyncio.run(_converse(traffic, False))
    assert sorted(endpoint.statuses()) == list(ids)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "None"])
@pytest.mark.parametrize("size", [0, 3, 100, 70_000])
def test_a_client_that_hangs_up_in_a_request_is_not_waited_for(method, size):
    sent = head(1, method) + frame(0, 0, 1, message(bytes(size), length=80_000)[: size + 1])
    endpoint = asyncio.run(_converse([sent], False, True))
    assert endpoint.closed


@pytest.mark.parametrize("content", [b"", b"\xff"])
def test_a_thousand_wrong_requests_at_once_are_as_many_errors(content):
    count = 3000
    # The client reads all of the answers.
    room = b"".join(frame(8, 0, stream_id, b"\x10\0\0\0") for stream_id in (0, 1))
    sent = head(1, "ModelStreamInfer") + room + frame(0, 1, 1, message(content) * count)
    endpoint = asyncio.run(_converse([sent], False))
    assert endpoint.statuses() == {1: [0]}
