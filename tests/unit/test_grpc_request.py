"""ModelInferRequest to the engine's request: data, options, and Triton's words for wrong ones."""

import json
import struct
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tritonclient.grpc import service_pb2

from gpubridge import dataplane
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.grpc import infer_request
from gpubridge.protocol.grpc.infer_request import read_request
from gpubridge.protocol.request_templates import TEMPLATE_BYTES
from gpubridge.request import RequestOptions
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import SignatureCache, decode_shapes
from tests.unit.grpc_requests import (
    BATCHED,
    IDENTITY,
    MODEL,
    Request,
    cache,
    make,
    raw,
    refusal,
    two_inputs,
    typed,
)

SIGNATURES = SignatureCache()


def test_raw_inputs_lie_aligned_in_the_slot():
    known, made, inputs = make(raw(("B", "FP32", [4], b"b" * 16), ("A", "FP32", [4], b"a" * 16)))
    assert inputs == [b"b" * 16, b"a" * 16]
    assert all(at % 64 == 0 for at, _ in made.places)
    assert made.copied == 32
    signature = SIGNATURES[made.signature]
    assert signature.tensors[0][:2] == ("B", "FP32")
    assert decode_shapes(signature, made.dims)[0] == (4,)
    assert (known.model, known.form.outputs, made.identifier, made.context) == (
        MODEL,
        None,
        "",
        RequestContext(),
    )


def test_outputs_asked_for_are_in_the_signature():
    request = two_inputs()
    for name in ("Y", "X", "Y"):
        request.outputs.add(name=name).parameters["binary_data"].bool_param = False
    known, made, _ = make(request)
    assert list(known.form.outputs) == ["Y", "X"]
    assert SIGNATURES[made.signature].requested == ("Y", "X")


def test_a_form_is_parsed_once_whatever_the_id_and_the_data(monkeypatch):
    forms = cache()
    first, _, _ = make(two_inputs(), forms=forms)
    monkeypatch.setattr(infer_request, "parse_message", None)
    other = two_inputs(id="one")
    other.raw_input_contents[1] = b"c" * 16
    known, made, inputs = make(other, forms=forms)
    assert (known.model, known.form.signature) == (first.model, first.form.signature)
    assert made.identifier == "one"
    assert inputs == [b"a" * 16, b"c" * 16]


def test_a_form_with_other_sizes_is_checked_again():
    forms = cache()
    make(two_inputs(), forms=forms)
    short = two_inputs(id="7")
    short.raw_input_contents[1] = b"c" * 8
    with pytest.raises(BridgeError, match=r"\[request id: 7\] input byte size mismatch"):
        make(short, forms=forms)


def test_strings_of_other_lengths_need_no_parser(monkeypatch):
    forms = cache(IDENTITY)
    make(raw(("BYTES", "BYTES", [1], b"\1\0\0\0x")), forms=forms)
    with monkeypatch.context() as patch:
        patch.setattr(infer_request, "parse_message", None)
        _, _, inputs = make(raw(("BYTES", "BYTES", [1], b"\3\0\0\0xyz")), forms=forms)
    assert inputs == [b"\3\0\0\0xyz"]
    with pytest.raises(BridgeError, match=r"\[request id: k\] expected 1 string elements .* got 0"):
        make(raw(("BYTES", "BYTES", [1], b""), id="k"), forms=forms)


def test_models_are_looked_up_again_when_they_changed():
    forms = cache()
    first, _, _ = make(two_inputs(), forms=forms)
    forms.forget(lambda model: model is first.model)
    second, _, _ = make(two_inputs(), forms=forms)
    assert second is not first


def test_remembered_templates_are_bounded():
    forms = cache()
    for version in range(3000):
        request = two_inputs(model_version=str(version) * 100)
        forms.read(read_request(request.SerializeToString()))
    assert forms.templates.nbytes <= TEMPLATE_BYTES
    assert len(forms.templates) < 3000


def test_a_batched_request_says_its_size():
    known, made, _ = make(raw(("A", "FP32", [3, 4], bytes(48))), BATCHED)
    assert made.batch_size == known.form.batch_size == 3
    assert astuple(made.options) == astuple(RequestOptions(shapes=(("A", (3, 4)),)))


def test_raw_contents_beyond_the_inputs_are_refused():
    request = two_inputs()
    make(request)
    request.raw_input_contents.append(b"more")
    _, text = refusal(request)
    assert "expected 2 raw_input_contents for model 'm'" in text
    assert text.endswith("got 3")


def test_inputs_of_no_bytes():
    assert make(raw(("FP32", "FP32", [0], b"")), IDENTITY)[2] == [b""]
    assert make(Request(model_name="m"), IDENTITY)[2] == []


def test_options_and_context():
    request = two_inputs()
    for name, field, value in (
        ("sequence_id", "int64_param", -1),
        ("sequence_start", "bool_param", True),
        ("sequence_end", "bool_param", True),
        ("priority", "uint64_param", 5),
        ("timeout", "int64_param", 7),
        ("triton_enable_empty_final_response", "bool_param", True),
        ("binary_data_output", "bool_param", True),
        ("a", "double_param", 1.5),
    ):
        setattr(request.parameters[name], field, value)
    known, made, _ = make(request)
    shapes = (("A", (4,)), ("B", (4,)))
    expected = RequestOptions(5, 7, (1 << 64) - 1, True, True, shapes)
    assert astuple(made.options) == astuple(expected)
    assert json.loads(made.context.parameters) == {"a": 1.5, "binary_data_output": True}
    assert made.context.changed(parameters="") == RequestContext(
        correlation_id=(1 << 64) - 1, flags=3, timeout=7
    )
    assert known.empty_final_response


def test_a_negative_timeout_is_taken_as_it_lies_in_memory():
    request = two_inputs()
    request.parameters["timeout"].int64_param = -5
    assert make(request)[1].options.timeout_us == (1 << 64) - 5


def test_a_sequence_may_have_a_name():
    request = two_inputs()
    request.parameters["sequence_id"].string_param = "abc"
    _, made, _ = make(request)
    assert made.options.correlation_id == "abc"
    assert made.context == RequestContext(correlation_text="abc")


def test_a_name_of_a_sequence_has_128_bytes_at_most():
    request = two_inputs()
    request.parameters["sequence_id"].string_param = "a" * 129
    with pytest.raises(BridgeError, match="string correlation ID cannot be longer than 128") as e:
        make(request)
    assert e.value.code is ErrorCode.UNSUPPORTED


def test_an_infinite_parameter_reaches_the_model():
    request = two_inputs()
    request.parameters["x"].double_param = float("inf")
    assert json.loads(make(request)[1].context.parameters) == {"x": float("inf")}


@pytest.mark.parametrize("nbytes", [65_527, 65_528, 65_529, 200_000])
def test_a_long_parameter_reaches_the_model(nbytes):
    """From 64 KiB on, parameters stay encoded."""
    forms = cache()
    for text in ("y" * nbytes, "z" * nbytes):
        request = two_inputs()
        request.parameters["x"].string_param = text
        made = make(request, forms=forms)[1]
        assert json.loads(
            bytes(made.context.parameters) if nbytes > 65_528 else made.context.parameters
        ) == {"x": text}


TYPED = [
    ("BOOL", "bool_contents", [True, False], "?"),
    ("INT8", "int_contents", [1, -2, 127, -128], "i1"),
    ("INT16", "int_contents", [1, -2, 32767], "i2"),
    ("INT32", "int_contents", [1, -2], "i4"),
    ("INT64", "int64_contents", [1, -(1 << 63)], "i8"),
    ("UINT8", "uint_contents", [1, 255], "u1"),
    ("UINT16", "uint_contents", [1, 65535], "u2"),
    ("UINT32", "uint_contents", [1, (1 << 32) - 1], "u4"),
    ("UINT64", "uint64_contents", [1, (1 << 64) - 1], "u8"),
    ("FP32", "fp32_contents", [1.5, float("inf")], "f4"),
    ("FP64", "fp64_contents", [1.1, -2.0], "f8"),
]


@pytest.mark.parametrize(("datatype", "field", "values", "dtype"), TYPED)
def test_typed_contents(datatype, field, values, dtype):
    _, _, inputs = make(typed(datatype, field, values), IDENTITY)
    assert inputs == [np.array(values, dtype).tobytes()]
    _, text = refusal(typed(datatype, field, values, len(values) + 1), IDENTITY)
    assert "input byte size mismatch" in text


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 32768),
        ("UINT8", "uint_contents", 300),
        ("UINT16", "uint_contents", 1 << 31),
    ],
)
def test_a_typed_number_beyond_its_datatype_is_named(datatype, field, value):
    _, text = refusal(typed(datatype, field, [0, 0, value]), IDENTITY)
    assert text == (
        f"element 2 of input '{datatype}' is {value}, which is beyond the range of {datatype}"
    )


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_typed_strings(values):
    _, _, inputs = make(typed("BYTES", "bytes_contents", values), IDENTITY)
    assert inputs == [b"".join(struct.pack("<I", len(v)) + v for v in values)]


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40))
def test_typed_integers_wrap_as_those_of_numpy(values):
    wire = service_pb2.InferTensorContents(int_contents=values).SerializeToString()
    expected = np.array(values, np.int64).astype(np.int8).tobytes()
    assert dataplane.pack_typed_contents(wire, 2, "varint", 1) == expected


def test_typed_contents_that_are_not_packed_on_the_wire_are_taken():
    assert dataplane.pack_typed_contents(b"\x10\x05\x10\xff\x01", 2, "varint", 2) == b"\5\0\xff\0"


def contents_field(number, wire_type, value):
    return bytes([number << 3 | wire_type]) + value


FOREIGN = {
    "varint": (0, b"\x84\x80\x80\x01"),
    "64 bits": (1, bytes(range(8))),
    "32 bits": (5, bytes(range(4))),
    "cut varints": (5, b"\xff\xff\xff\xff"),
    "group": (3, b"\x0a\x01x\x13\x08\x01\x14" + b"\x1c"),
}


# Field, number, wire type of single values, values and dtype, by datatype.
TYPED = {
    "INT32": ("int_contents", 2, 0, [1, 2], np.int32),
    "FP32": ("fp32_contents", 6, 5, [1.5, 2], np.float32),
    "FP64": ("fp64_contents", 7, 1, [1.5, 2], np.float64),
    "BYTES": ("bytes_contents", 8, 2, [b"a", b"bc"], None),
}


@pytest.mark.parametrize(
    ("datatype", "foreign"),
    [(of, name) for of in TYPED for name, (kind, _) in FOREIGN.items() if kind != TYPED[of][2]],
)
def test_typed_contents_of_another_wire_type_are_unknown_fields(datatype, foreign):
    field, number, _, values, dtype = TYPED[datatype]
    wire_type, value = FOREIGN[foreign]
    if wire_type == 3:
        value = value[:-1] + bytes([number << 3 | 4])
    message = typed(datatype, field, values)
    message.inputs[0].contents.MergeFromString(contents_field(number, wire_type, value))
    _, _, inputs = make(message, IDENTITY)
    if dtype is None:
        assert inputs == [b"".join(struct.pack("<I", len(v)) + v for v in values)]
    else:
        assert inputs == [np.array(values, dtype).tobytes()]
