"""Request headers: what they mean, and that no header whatever is anything but an error."""

import json
import math

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import infer_request
from gpubridge.protocol.infer_request import FormCache, raw_request
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import DATATYPES, item_size, numpy_dtype
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import SignatureCache, decode_shapes
from tests.unit.model_configs import model_config

EVERY = [name for name in DATATYPES if name != "BYTES"]
ALL_TYPES = model_config(
    ";".join(f"{name} {name} [-1] optional: true" for name in EVERY)
    + ";BYTES STRING [-1] optional: true"
)
TWO = model_config("A FP32 [-1];B FP32 [-1]", "X FP32 [-1];Y FP32 [-1]")


def entry(name="A", shape=(2,), datatype="FP32", **members):
    return {"name": name, "shape": list(shape), "datatype": datatype, **members}


def document(*inputs, **members):
    return orjson.dumps({"inputs": list(inputs), **members})


def binary(name, datatype, shape, nbytes):
    return entry(name, shape, datatype, parameters={"binary_data_size": nbytes})


def announced(raw):
    try:
        return sum(item["parameters"]["binary_data_size"] for item in json.loads(raw)["inputs"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return 0


def parse_request(raw, config):
    return infer_request.parse_request(raw, config, announced(raw))


TENSORS = st.lists(
    st.tuples(st.sampled_from(EVERY), st.integers(0, 40)), unique_by=lambda t: t[0], max_size=13
)


@given(TENSORS)
def test_binary_inputs_lie_one_after_the_other(tensors):
    inputs = [binary(name, name, [count], count * item_size(name)) for name, count in tensors]
    form = parse_request(document(*inputs), ALL_TYPES)
    sizes = [count * item_size(name) for name, count in tensors]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert list(form.places) == list(zip(starts, sizes, strict=True))
    assert form.binary_bytes == sum(sizes)
    assert not form.packed
    assert form.strings == ()
    assert form.aligned == all(
        start % item_size(name) == 0 for (name, _), start in zip(tensors, starts, strict=True)
    )
    signature = SignatureCache()[form.signature]
    shapes = decode_shapes(signature, form.dims)
    told = zip(signature.tensors, shapes, strict=True)
    assert [(t.name, t.datatype, shape, t.nbytes(shape)) for t, shape in told] == [
        (name, name, (count,), size) for (name, count), size in zip(tensors, sizes, strict=True)
    ]
    assert signature.requested == ()


VALUES = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65_535],
    "UINT32": [0, (1 << 32) - 1],
    "UINT64": [0, (1 << 64) - 1],
    "INT8": [-128, 127],
    "INT16": [-(1 << 15), (1 << 15) - 1],
    "INT32": [-(1 << 31), (1 << 31) - 1],
    "INT64": [-(1 << 63), (1 << 63) - 1],
    "FP32": [0.5, 1, -0.0, 16_777_217, 3.4e38],
    "FP64": [0.1, 1, -1e300, 5e-324],
}


@pytest.mark.parametrize(("datatype", "values"), VALUES.items())
def test_values_of_every_datatype_as_json(datatype, values):
    form = parse_request(document(entry(datatype, [len(values)], datatype, data=values)), ALL_TYPES)
    dtype = numpy_dtype(datatype)
    assert form.inputs[0].data == np.array(values, dtype).tobytes()
    assert form.packed
    assert form.binary_bytes == 0


@pytest.mark.parametrize(
    ("datatype", "value", "told"),
    [
        ("UINT8", 300, "300"),
        ("UINT16", 65_536, "65536"),
        ("UINT32", 1 << 32, "4294967296"),
        ("INT8", 128, "128"),
        ("INT16", -32_769, "-32769"),
        ("INT32", 1 << 31, "2147483648"),
        ("FP32", -1e39, "-1e+39"),
    ],
)
@pytest.mark.parametrize("count", [2, 100_000])
def test_a_number_beyond_its_datatype_is_named(datatype, value, told, count):
    values = [*[1] * (count - 1), value]
    with pytest.raises(BridgeError) as caught:
        parse_request(document(entry(datatype, [count], datatype, data=values)), ALL_TYPES)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"element {count - 1} of input '{datatype}' is {told}, which is beyond the range of {datatype}"
    )


def test_strings_as_json():
    texts = ["", "a", "\u00e9\0", "x" * 300]
    form = parse_request(document(entry("BYTES", [4], "BYTES", data=texts)), ALL_TYPES)
    assert bytes_codec.decode(form.inputs[0].data).tolist() == [t.encode() for t in texts]
    assert form.strings == ()


@pytest.mark.parametrize(
    "data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1, [2, [3], []], 4], [[[[1, 2, 3, 4]]]]]
)
def test_any_nesting_of_values_is_flat(data):
    form = parse_request(document(entry("FP32", [4], "FP32", data=data)), ALL_TYPES)
    assert form.inputs[0].data == np.arange(1, 5, dtype=np.float32).tobytes()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_that_are_no_json_are_taken(literal):
    raw = document(entry("FP64", [1], "FP64", data=[0])).replace(b"[0]", f"[{literal}]".encode())
    value = np.frombuffer(parse_request(raw, ALL_TYPES).inputs[0].data)[0]
    assert str(value) == str(float(literal))


@pytest.mark.parametrize("number", [(1 << 64) - 1, -(1 << 63), 1 << 64, -(1 << 63) - 1, 10**400])
def test_integers_beside_a_literal_are_read_as_without_it(number):
    raw = f'{{"inputs":[],"parameters":{{"n":{number}}},"x":NaN}}'.encode()
    got = json.loads(parse_request(raw, ALL_TYPES).context.parameters)["n"]
    if -(1 << 63) <= number < 1 << 64:
        assert got == number
    else:
        assert got is None or got == float(str(number))


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\xff{", b'\0{"inputs":5}'])
def test_a_nul_byte_ends_the_document(rest):
    assert parse_request(document(id="x") + rest, ALL_TYPES).identifier == "x"
    with_literal = b'{"inputs":[],"x":NaN}'
    assert parse_request(with_literal + rest, ALL_TYPES).inputs == []
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(b'{"inputs":[],"id":"x' + rest, ALL_TYPES)
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(rest, ALL_TYPES)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([1, 2, None], "Shape does not match true shape"),
        ([1, None], "attempt to access JSON non-number as double"),
        ([None], "attempt to access JSON non-number as double"),
        ([1], "Shape does not match true shape"),
    ],
)
def test_the_first_fault_of_the_values_is_told(data, text):
    with pytest.raises(BridgeError, match=text):
        parse_request(document(entry("FP32", [2], "FP32", data=data)), ALL_TYPES)


def test_parameters_must_be_an_object_save_those_of_a_tensor():
    asked = [{"name": "X", "parameters": []}]
    inputs = entry(data=[1, 2], parameters=[]), entry("B", data=[1, 2])
    assert not parse_request(document(*inputs, outputs=asked), TWO).outputs["X"].binary
    for other in ([], None, 5):
        with pytest.raises(BridgeError, match="attempt to get members for non-object"):
            parse_request(document(parameters=other), ALL_TYPES)


def test_a_batching_model_needs_an_input_to_know_the_batch():
    config = model_config("A FP32 [1] optional: true", more="max_batch_size: 4")
    with pytest.raises(BridgeError, match="out of bounds index 0: request has 0 inputs"):
        parse_request(document(), config)
    assert parse_request(document(), ALL_TYPES).inputs == []


@pytest.mark.parametrize("number", [-1, 1.5, None, True])
def test_a_sequence_id_is_a_number_or_a_text(number):
    with pytest.raises(BridgeError, match=r"Unable to parse 'sequence_id'.* non-string as string"):
        parse_request(document(parameters={"sequence_id": number}), ALL_TYPES)


def test_a_byte_order_mark_is_skipped():
    assert parse_request(b"\xef\xbb\xbf" + document(), ALL_TYPES).inputs == []


@pytest.mark.parametrize(
    ("members", "named", "unnamed"),
    [
        ({}, None, False),
        ({"parameters": {"binary_data_output": True}}, None, True),
        ({"outputs": [], "parameters": {"binary_data_output": True}}, None, True),
        ({"outputs": [{"name": "X"}]}, {"X": False}, False),
        ({"outputs": [{"name": "X", "parameters": {"binary_data": True}}]}, {"X": True}, False),
        # The request's wish is for requests that name no outputs.
        (
            {"outputs": [{"name": "X"}], "parameters": {"binary_data_output": True}},
            {"X": False},
            True,
        ),
    ],
)
def test_requested_forms_of_outputs(members, named, unnamed):
    form = parse_request(document(entry(data=[1, 2]), entry("B", data=[1, 2]), **members), TWO)
    outputs = form.outputs and {name: output.binary for name, output in form.outputs.items()}
    assert outputs == named
    assert form.binary_default is unnamed
    assert SignatureCache()[form.signature].requested == tuple(named or ())


def test_parameters_of_the_protocol_and_of_the_model_go_apart():
    given = {
        "binary_data_output": False,
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 3,
        "timeout": 9,
        "mine": "x",
        "n": 1,
        "b": False,
        "f": 0.5,
    }
    context = parse_request(document(parameters=given), ALL_TYPES).context
    assert json.loads(context.parameters) == {"mine": "x", "n": 1, "b": False, "f": 0.5}
    assert context.changed(parameters="") == RequestContext(correlation_id=5, flags=3, timeout=9)
    assert parse_request(document(), ALL_TYPES).context.encoded() == b""


@pytest.mark.parametrize(
    ("dims", "more", "shape", "seen"),
    [
        ("[4] reshape { shape: [2, 2] }", "", [4], [2, 2]),
        ("[1] reshape { shape: [] }", "max_batch_size: 4", [3, 1], [3]),
        ("[-1, 2] reshape { shape: [-1, 1, 2] }", "", [3, 2], [3, 1, 2]),
    ],
)
def test_the_model_sees_the_reshaped_input(dims, more, shape, seen):
    config = model_config(f"A FP32 {dims}", more=more)
    size = 4 * math.prod(shape)
    form = parse_request(document(binary("A", "FP32", shape, size)), config)
    assert list(decode_shapes(SignatureCache()[form.signature], form.dims)[0]) == seen


@pytest.mark.parametrize("prefix", [b"", b'{"x":NaN,"inputs":', b'{"inputs":'])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_depth_is_an_error(prefix, bracket):
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(prefix + bracket * 100_000, TWO)


@pytest.mark.parametrize("surrogate", [rb"\ud800", rb"\uDFFF", rb"\ud800x"])
def test_lone_surrogates_are_errors_beside_literals_too(surrogate):
    for text in (b'{"inputs":[],"id":"%b"}', b'{"inputs":[],"id":"%b","x":NaN}'):
        with pytest.raises(BridgeError, match="failed to parse the request JSON"):
            parse_request(text % surrogate, ALL_TYPES)


@pytest.mark.parametrize(
    ("inputs", "nbytes", "more", "shape"),
    [("A FP32 [2, 2]", 16, "", (2, 2)), ("A INT8 [3]", 3, "max_batch_size: 4", (1, 3))],
)
def test_a_body_without_a_header_is_the_one_input(inputs, nbytes, more, shape):
    form = raw_request(model_config(inputs, more=more), nbytes)
    assert form.inputs[0].shape == shape
    assert form.places == ((0, nbytes),)
    assert form.binary_default


@pytest.mark.parametrize(
    ("inputs", "nbytes", "text"),
    [
        ("A FP32 [2];B FP32 [2]", 16, "must only have 1 input"),
        ("A FP32 [-1]", 16, "can not be deduced"),
        ("A FP32 [2]", 9, "input 'raw_input' for model 'm'. Expected 8, got 9"),
    ],
)
def test_bodies_that_cannot_be_the_one_input(inputs, nbytes, text):
    with pytest.raises(BridgeError, match=text):
        raw_request(model_config(inputs), nbytes)


@pytest.mark.parametrize(
    ("following", "text"),
    [
        (15, "unexpected size for input 'B', expecting 1 additional bytes for model 'm'"),
        (3, "unexpected size for input 'A', expecting 5 additional bytes for model 'm'"),
        (17, "unexpected additional input data for model 'm'"),
    ],
)
def test_bytes_after_the_header_are_those_that_it_announces(following, text):
    raw = document(binary("A", "FP32", [2], 8), binary("B", "FP32", [2], 8))
    cache = FormCache(TWO)
    cache.parse(raw, 16)
    with pytest.raises(BridgeError, match=text):
        cache.parse(raw, following)


def test_the_length_of_the_body_is_checked_before_that_of_a_tensor():
    raw = document(binary("A", "FP32", [2], 12), binary("B", "FP32", [2], 8))
    with pytest.raises(BridgeError, match="unexpected size for input 'B'"):
        infer_request.parse_request(raw, TWO, 16)
    with pytest.raises(BridgeError, match="input byte size mismatch for input 'A'"):
        infer_request.parse_request(raw, TWO, 20)
