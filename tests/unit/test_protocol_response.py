"""Answers: their header's exact bytes, values of every datatype, and what is sent uncopied."""

import json
import math
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import infer_response
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response
from gpubridge.protocol.status import error_body
from gpubridge.request import EncodedParameters, InferResponse, LongParameters
from gpubridge.transport.signatures import SignatureCache, decode_shapes, encode_tensors
from tests.unit.model_configs import model_config

CONFIG = model_config("", "A FP32 [-1];B STRING [-1]")

SIGNATURES = SignatureCache()


def form(config=CONFIG, **members):
    return parse_request(orjson.dumps({"inputs": [], **members}), config, 0)


def answer(*tensors, parameters=None):
    raw, dims = encode_tensors([tensor[:3] for tensor in tensors])
    signature = SIGNATURES[raw]
    shapes = decode_shapes(signature, dims)
    return InferResponse(signature, shapes, [memoryview(t[3]) for t in tensors], parameters)


TWO = [
    ("A", "FP32", [2], struct.pack("<2f", 1.5, 2)),
    ("B", "BYTES", [1], struct.pack("<I", 2) + b"hi"),
]
BINARY = {"parameters": {"binary_data_output": True}}


SHAPES = st.lists(st.integers(0, 3), max_size=3)
OUTPUTS = st.lists(
    st.tuples(st.text(max_size=3), st.sampled_from(["UINT8", "BYTES"]), SHAPES), max_size=5
)


@given(OUTPUTS, st.data())
def test_headers_are_those_that_orjson_writes(outputs, data):
    asked = form(**BINARY)
    for _ in range(3):
        identifier = data.draw(st.text())
        parameters = data.draw(st.none() | st.dictionaries(st.text(), st.integers(0, 9)))
        tensors, expected = [], []
        for name, datatype, dims in outputs:
            shape = [data.draw(st.integers(0, 1 << 40)) if dim else 0 for dim in dims]
            shape = shape if datatype == "BYTES" and 0 in shape else dims
            nbytes = int(np.prod(shape)) if datatype == "UINT8" else data.draw(st.integers(0, 40))
            tensors.append((name, datatype, shape, bytes(nbytes)))
            expected.append(
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": shape,
                    "parameters": {"binary_data_size": nbytes},
                }
            )
        encoded = encode_response(
            asked, identifier, answer(*tensors, parameters=parameters), CONFIG, 3
        )
        assert encoded.header == orjson.dumps(
            {
                **({"id": identifier} if identifier else {}),
                "model_name": "m",
                "model_version": "3",
                **({"parameters": parameters} if parameters else {}),
                "outputs": expected,
            }
        )
        assert max(encoded.nbytes, 0) == sum(len(tensor[3]) for tensor in tensors)


LONG = LongParameters((EncodedParameters(b'"a":1', b""), {"b": 2}))


@pytest.mark.parametrize("parameters", [None, {"n": 1}, LONG], ids=["none", "some", "long"])
@pytest.mark.parametrize("binary", [[], ["A"], ["B"], ["A", "B"]], ids="-".join)
def test_long_json_is_sent_in_pieces(monkeypatch, parameters, binary):
    wanted = [{"name": name, "parameters": {"binary_data": name in binary}} for name in "AB"]
    shown = []
    for longest in (1 << 16, 4):
        monkeypatch.setattr(infer_response, "_LONG_TEXT", longest)
        response = answer(*TWO, parameters=parameters)
        encoded = encode_response(form(outputs=wanted), "\0", response, CONFIG, 1)
        whole = b"".join([encoded.header, *encoded.buffers])
        shown.append((whole, encoded.header_bytes, encoded.nbytes))
    assert shown[0] == shown[1]
    for name, values in ("A", b"[1.5,2.0]"), ("B", b'["hi"]'):
        assert (values in list(encoded.buffers)) == (name not in binary)


@pytest.mark.parametrize("parameters", [{"a": "\ud800"}, {"\ud800": 1}, {"a": 10**30}])
def test_odd_parameters_make_json(parameters):
    encoded = encode_response(form(), "", answer(parameters=parameters), CONFIG, 1)
    assert len(orjson.loads(encoded.header.replace(str(10**30).encode(), b"0"))["parameters"]) == 1


@pytest.mark.parametrize(
    ("dims", "more", "returned", "shown"),
    [
        ("[4] reshape { shape: [2, 2] }", "", [2, 2], [4]),
        ("[1] reshape { shape: [] }", "max_batch_size: 4", [3], [3, 1]),
        ("[-1, 2] reshape { shape: [-1, 1, 2] }", "", [3, 1, 2], [3, 2]),
        # As in Triton, only their number matters where all dims are known.
        ("[4] reshape { shape: [2, 2] }", "", [4], [4]),
    ],
)
def test_reshaped_outputs_have_the_configured_shape(dims, more, returned, shown):
    config = model_config("", f"A FP32 {dims}", more)
    data = bytes(4 * int(np.prod(returned, dtype=int)))
    encoded = encode_response(form(), "", answer(("A", "FP32", returned, data)), config, 1)
    assert json.loads(encoded.header)["outputs"][0]["shape"] == shown


@pytest.mark.parametrize(
    ("dims", "more", "returned"),
    [
        ("[4] reshape { shape: [2, 2] }", "", [3, 2]),
        ("[4] reshape { shape: [2, 2] }", "max_batch_size: 8", [1, 6]),
        ("[1] reshape { shape: [] }", "max_batch_size: 8", [1, 6]),
        ("[-1] reshape { shape: [1, -1] }", "", [6]),
        ("[-1, 3] reshape { shape: [1, -1, 3] }", "", [2, 3]),
    ],
)
def test_an_output_that_is_not_what_metadata_promise_is_an_error(dims, more, returned):
    config = model_config("", f"A FP32 {dims}", more)
    response = answer(("A", "FP32", returned, bytes(4 * math.prod(returned))))
    with pytest.raises(BridgeError, match="does not match size of output for 'A'") as raised:
        encode_response(form(), "", response, config, 1)
    assert raised.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("text", "body"), [('a"\n', b'{"error":"a\\"\\n"}'), ("\ud800", b'{"error":"?"}')]
)
def test_errors_are_json_whatever_their_text(text, body):
    assert error_body(BridgeError(text)) == [body]
