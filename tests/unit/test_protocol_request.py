"""Request headers: what they mean, and that no header whatever is anything but an error."""

import json

import orjson
import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol import infer_request
from gpubridge.protocol.infer_request import raw_request
from gpubridge.tensor.datatypes import DATATYPES, item_size
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


@pytest.mark.parametrize("number", [(1 << 64) - 1, -(1 << 63), 1 << 64, -(1 << 63) - 1, 10**400])
def test_integers_beside_a_literal_are_read_as_without_it(number):
    raw = f'{{"inputs":[],"parameters":{{"n":{number}}},"x":NaN}}'.encode()
    got = json.loads(parse_request(raw, ALL_TYPES).context.parameters)["n"]
    if -(1 << 63) <= number < 1 << 64:
        assert got == number
    else:
        assert got is None or got == float(str(number))


@pytest.mark.parametrize("number", [-1, 1.5, None, True])
def test_a_sequence_id_is_a_number_or_a_text(number):
    with pytest.raises(BridgeError, match=r"Unable to parse 'sequence_id'.* non-string as string"):
        parse_request(document(parameters={"sequence_id": number}), ALL_TYPES)


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\xff{", b'\0{"inputs":5}'])
def test_a_nul_byte_ends_the_document(rest):
    assert parse_request(document(id="x") + rest, ALL_TYPES).identifier == "x"
    with_literal = b'{"inputs":[],"x":NaN}'
    assert parse_request(with_literal + rest, ALL_TYPES).inputs == []
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(b'{"inputs":[],"id":"x' + rest, ALL_TYPES)
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(rest, ALL_TYPES)


@pytest.mark.parametrize("prefix", [b"", b'{"x":NaN,"inputs":', b'{"inputs":'])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_depth_is_an_error(prefix, bracket):
    with pytest.raises(BridgeError, match="failed to parse the request JSON"):
        parse_request(prefix + bracket * 20_000, TWO)


@pytest.mark.parametrize("surrogate", [rb"\ud800", rb"\uDFFF", rb"\ud800x"])
def test_lone_surrogates_are_errors_beside_literals_too(surrogate):
    for text in (b'{"inputs":[],"id":"%b"}', b'{"inputs":[],"id":"%b","x":NaN}'):
        with pytest.raises(BridgeError, match="failed to parse the request JSON"):
            parse_request(text % surrogate, ALL_TYPES)


@pytest.mark.parametrize(
    ("inputs", "nbytes", "more", "shape"),
    [
        ("A FP32 [2, 2]", 16, "", (2, 2)),
        ("A INT8 [3]", 3, "max_batch_size: 4", (1, 3)),
        ("A UINT8 [-1]", 7, "", (7,)),
        ("A UINT8 [-1]", 7, "max_batch_size: 4", (1, 7)),
        ("A UINT8 [-1]", 0, "", (0,)),
        ("A INT32 [2, -1]", 16, "", (2, 2)),
    ],
)
def test_a_body_without_a_header_is_the_one_input(inputs, nbytes, more, shape):
    form = raw_request(model_config(inputs, more=more), nbytes)
    assert form.inputs[0].shape == shape
    # Without a body there is no slot for the input to be in.
    assert form.packed == (nbytes == 0)
    assert form.places == ((0, nbytes),)
    assert form.binary_default


@pytest.mark.parametrize(
    ("inputs", "nbytes", "text"),
    [
        ("A FP32 [2];B FP32 [2]", 16, "must only have 1 input"),
        ("A FP32 [-1, -1]", 16, "there are more than one variable-sized dimension"),
        ("A FP32 [-1]", 7, "input 'raw_input' for model 'm'. Expected 4, got 7"),
        ("A STRING [-1]", 7, "the model must have input shape \\[1\\]"),
        ("A FP32 [2]", 9, "input 'raw_input' for model 'm'. Expected 8, got 9"),
    ],
)
def test_bodies_that_cannot_be_the_one_input(inputs, nbytes, text):
    with pytest.raises(BridgeError, match=text):
        raw_request(model_config(inputs), nbytes)


@pytest.mark.parametrize(
    ("shape", "data", "text"),
    [
        ("[2]", '["a"]', "expected 2 string elements for inference input 'B' for model 'm', got 1"),
        ("[1]", '["a","b"]', "unexpected number of string elements 2 .* expecting 1"),
        ("[]", '["a"]', "unexpected shape for input 'B'"),
        ("[]", "1", "unexpected shape for input 'B'"),
        ("[1,1]", '["a","b"]', "unexpected shape for input 'B'"),
    ],
)
def test_the_number_of_strings_is_looked_at_after_the_shape(shape, data, text):
    header = f'{{"inputs":[{{"name":"B","shape":{shape},"datatype":"BYTES","data":{data}}}]}}'
    with pytest.raises(BridgeError, match=text) as raised:
        parse_request(header.encode(), model_config("B STRING [-1]"))
    assert raised.value.code is ErrorCode.INVALID_ARG


def test_null_for_the_parameters_of_tensors_is_none():
    entry = b'{"name":"B","shape":[1],"datatype":"BYTES","data":["a"],"parameters":null}'
    outputs = b'"outputs":[{"name":"OUT","parameters":null}]'
    form = parse_request(b'{"inputs":[%b],%b}' % (entry, outputs), model_config("B STRING [-1]"))
    assert (form.inputs[0].data, list(form.outputs)) == (b"\1\0\0\0a", ["OUT"])


DATA = "Unable to parse 'data': "
NO_NUMBER = (
    DATA
    + "attempt to access JSON non-number as double: expected a number for element 1 of input 'A' (FP32), got "
)
NO_UNSIGNED = (
    "attempt to access JSON non-unsigned-integer as unsigned-integer: expected an integer of 0 or more, "
    "of 64 bits"
)


@pytest.mark.parametrize(
    ("config", "raw", "text"),
    [
        (TWO, document(entry(data=[1, "x" * 99])), NO_NUMBER + '"' + "x" * 32 + '..."'),
        (TWO, document(entry(data=[1, None])), NO_NUMBER + "null"),
        (TWO, document(entry(data=[1, {}])), NO_NUMBER + "an object"),
        (
            ALL_TYPES,
            document(entry("UINT8", (1,), "UINT8", data=[-1])),
            DATA + NO_UNSIGNED + " for element 0 of input 'UINT8' (UINT8), got -1",
        ),
        (
            ALL_TYPES,
            document(entry("BYTES", (1,), "BYTES", data=[7])),
            (
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string: expected a "
                "string for element 0 of input 'BYTES' (BYTES), got 7"
            ),
        ),
        (
            TWO,
            document(entry(data=[1])),
            DATA
            + "Shape does not match true shape of 'data' field: input 'A' has the shape [2], which is "
            "2 values, got 1",
        ),
        (
            TWO,
            document(entry(shape=["a"])),
            f"Unable to parse 'shape': {NO_UNSIGNED} of input 'A', got \"a\"",
        ),
        (
            TWO,
            b'{"input": []}',
            (
                "Unable to parse 'inputs': attempt to access non-existing object member 'inputs': got the "
                "members 'input'"
            ),
        ),
        (
            TWO,
            document(*(entry(name, data=[1, 2]) for name in "AC")),
            "unexpected inference input 'C' for model 'm': its inputs are 'A', 'B'",
        ),
        (
            TWO,
            document(outputs=[{"name": "Z"}]),
            "unexpected inference output 'Z' for model 'm': its outputs are 'X', 'Y'",
        ),
    ],
)
def test_what_a_client_sent_wrong_is_named(config, raw, text):
    with pytest.raises(BridgeError) as caught:
        parse_request(raw, config)
    assert (caught.value.message, caught.value.code) == (text, ErrorCode.INVALID_ARG)
