"""ModelInferResponse frames, read back by protobuf itself."""

import math
import struct

import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.protocol.grpc.infer_response import FRAME_PREFIX, encode_frame, encode_response
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import NO_CONTEXT, InferResponse
from gpubridge.schema import message_class
from gpubridge.transport.signatures import SignatureCache, decode_shapes, encode_tensors
from tests.unit.model_configs import model_config

CONFIG = model_config("", "A FP32 [-1];B STRING [-1]")
SIGNATURES = SignatureCache()
Response = message_class("ModelInferResponse")
StreamResponse = message_class("ModelStreamInferResponse")


def form():
    return RequestForm("", [], [], None, True, b"", NO_CONTEXT, 0, (), (), True)


def answer(*tensors, parameters=None):
    raw, dims = encode_tensors([tensor[:3] for tensor in tensors])
    signature = SIGNATURES[raw]
    shapes = decode_shapes(signature, dims)
    return InferResponse(signature, shapes, [memoryview(t[3]) for t in tensors], parameters)


def decode(segments):
    frame = b"".join(segments)
    assert frame[0] == 0
    assert int.from_bytes(frame[1:FRAME_PREFIX], "big") == len(frame) - FRAME_PREFIX
    return Response.FromString(frame[FRAME_PREFIX:])


TWO = [
    ("A", "FP32", [2], struct.pack("<2f", 1.5, 2)),
    ("B", "BYTES", [1], struct.pack("<I", 2) + b"hi"),
]


def expected(tensors, **fields):
    response = Response(model_name="m", model_version="3", **fields)
    for name, datatype, shape, data in tensors:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)
    return response


SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.lists(
    st.tuples(st.text(max_size=4), st.sampled_from(["UINT8", "BYTES"]), SHAPES), max_size=4
)


@given(TENSORS, st.text(max_size=200), st.data())
def test_it_is_protobuf_in_tritons_order(tensors, identifier, data):
    kept = form()
    for _ in range(2):
        full = []
        for name, datatype, shape in tensors:
            nbytes = data.draw(st.integers(0, 300)) if datatype == "BYTES" else 1
            for dim in shape if datatype == "UINT8" else ():
                nbytes *= dim
            full.append(
                (name, datatype, shape, data.draw(st.binary(min_size=nbytes, max_size=nbytes)))
            )
        for given_id in (identifier, ""):
            segments = encode_response(kept, given_id, answer(*full), CONFIG, 3)
            same = expected(full, id=given_id)
            assert b"".join(segments)[FRAME_PREFIX:] == same.SerializeToString()
            assert decode(segments) == same


@given(TENSORS, st.text(max_size=9), st.booleans(), st.booleans(), st.data())
def test_responses_of_a_stream_are_protobufs(tensors, identifier, final, told, data):
    full = []
    for name, datatype, shape in tensors:
        nbytes = data.draw(st.integers(0, 3000)) if datatype == "BYTES" else math.prod(shape)
        full.append((name, datatype, shape, bytes(nbytes)))
    response = answer(*full, parameters={"n": 1} if told else None)
    segments = encode_response(form(), identifier, response, CONFIG, 3, final=final)
    wanted = StreamResponse(infer_response=expected(full, id=identifier))
    wanted.infer_response.parameters["triton_final_response"].bool_param = final
    if told:
        wanted.infer_response.parameters["n"].int64_param = 1
    frame = b"".join(segments)
    assert int.from_bytes(frame[1:FRAME_PREFIX], "big") == len(frame) - FRAME_PREFIX
    assert StreamResponse.FromString(frame[FRAME_PREFIX:]) == wanted


def test_many_small_outputs_are_joined_and_long_ones_are_not():
    tensors = [(f"A{i}", "UINT8", [64 + i], bytes([i % 256]) * (64 + i)) for i in range(500)]
    tensors[250] = ("A250", "UINT8", [100_000], bytes(100_000))
    segments = encode_response(form(), "", answer(*tensors), CONFIG, 3)
    assert decode(segments) == expected(tensors)
    assert [len(part) for part in segments if isinstance(part, memoryview)] == [100_000]


def test_a_small_answer_is_one_piece_and_a_large_one_is_not_copied():
    assert len(encode_response(form(), "", answer(*TWO), CONFIG, 1)) == 1
    large = bytes(100_000)
    segments = encode_response(
        form(), "", answer(("A", "FP32", [25_000], large), TWO[1]), CONFIG, 1
    )
    assert any(isinstance(part, memoryview) and part.obj is large for part in segments)
    assert decode(segments).raw_output_contents[0] == large


@pytest.mark.parametrize("count", [127, 128, 16383, 16384, 2097151, 2097152])
def test_sizes_around_the_steps_of_a_varint(count):
    data = bytes(count)
    assert decode(
        encode_response(form(), "", answer(("A", "UINT8", [count], data)), CONFIG, 3)
    ) == expected([("A", "UINT8", [count], data)])


def test_another_form_of_answer_to_the_same_form_of_request():
    kept = form()
    encode_response(kept, "", answer(*TWO), CONFIG, 3)
    other = [("A", "FP32", [1], bytes(4))]
    assert decode(encode_response(kept, "", answer(*other), CONFIG, 3)) == expected(other)


def test_parameters():
    given_ = {"b": True, "i": -5, "u": 1 << 63, "s": "text\ud800", "d": 1.5}
    response = decode(encode_response(form(), "x", answer(*TWO, parameters=given_), CONFIG, 3))
    found = {
        name: (
            value.WhichOneof("parameter_choice"),
            getattr(value, value.WhichOneof("parameter_choice")),
        )
        for name, value in response.parameters.items()
    }
    assert found == {
        "b": ("bool_param", True),
        "i": ("int64_param", -5),
        "u": ("uint64_param", 1 << 63),
        "s": ("string_param", "text?"),
        "d": ("double_param", 1.5),
    }
    del response.parameters["b"], response.parameters["i"], response.parameters["u"]
    del response.parameters["s"], response.parameters["d"]
    assert response == expected(TWO, id="x")


def test_a_parameter_without_a_place_in_protobuf():
    with pytest.raises(BridgeError, match=r"response parameter 'x'.*int of 64 bits, got 184467"):
        encode_response(form(), "", answer(*TWO, parameters={"x": 1 << 64}), CONFIG, 1)


def test_a_reshaped_output_has_the_configured_dims():
    config = model_config("", "A FP32 [1,2] reshape: { shape: [ 2 ] }")
    response = decode(encode_response(form(), "", answer(TWO[0]), config, 1))
    assert list(response.outputs[0].shape) == [1, 2]


def test_no_outputs():
    assert decode(encode_response(form(), "", answer(), CONFIG, 3)) == expected([])


def test_a_frame():
    assert encode_frame(b"abc") == b"\0\0\0\0\3abc"
