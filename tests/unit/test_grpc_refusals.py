"""Requests that are refused: Triton's words, as recorded from Triton 2.51."""

import pytest

from tests.unit.grpc_requests import BATCHED, IDENTITY, Request, raw, refusal, two_inputs, typed


def edited(edit, **fields):
    request = two_inputs(**fields)
    edit(request)
    return request


def without_raw(request):
    del request.raw_input_contents[:]
    for entry in request.inputs:
        entry.contents.fp32_contents.extend([1, 2, 3, 4])


def region(tensor, name="reg", size=16):
    tensor.parameters["shared_memory_region"].string_param = name
    if size is not None:
        tensor.parameters["shared_memory_byte_size"].int64_param = size


def change(request, **fields):
    for name, value in fields.items():
        if name == "shape":
            request.inputs[0].shape[:] = value
        else:
            setattr(request.inputs[0], name, value)


def parameter(name, field, value):
    return lambda request: setattr(request.parameters[name], field, value)


def on(tensors, name, field, value):
    def edit(request):
        entry = request.inputs[0] if tensors == "inputs" else request.outputs.add(name="X")
        setattr(entry.parameters[name], field, value)

    return edit


def two(*edits):
    return lambda request: [edit(request) for edit in edits]


UNKNOWN_ID = "[request id: <id_unknown>] "
RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
    "starting with 'triton_' are allowed: triton_enable_empty_final_response"
)

# What Triton 2.51 says; model and tensors renamed.
NO_OUTPUT = "unexpected inference output 'Z' for model 'm': its outputs are 'X', 'Y'"
REFUSED = [
    (
        lambda r: r.raw_input_contents.pop(),
        "unable to find data for input tensor 'B' for model 'm' in request.",
    ),
    (
        lambda r: r.raw_input_contents.__setitem__(1, b"x" * 4),
        UNKNOWN_ID + "input byte size mismatch for input 'B' for model 'm'. Expected 16, got 4",
    ),
    (
        lambda r: r.inputs[0].contents.SetInParent(),
        "contents field must not be specified when using raw_input_contents for 'A' for model 'm'",
    ),
    (
        two(without_raw, lambda r: r.inputs[1].contents.fp64_contents.append(1)),
        (
            "unexpected explicit tensor data for input tensor 'B' for model 'm', binary data was already "
            "supplied."
        ),
    ),
    (
        two(without_raw, lambda r: r.inputs[1].contents.int_contents.append(1)),
        (
            "unexpected explicit tensor data for input tensor 'B' for model 'm' of type 'INT32', expected "
            "datatype 'FP32'"
        ),
    ),
    (
        two(without_raw, lambda r: change(r, datatype="FOO")),
        (
            "unexpected explicit tensor data for input tensor 'A' for model 'm' of type 'FP32', expected "
            "datatype '<invalid>'"
        ),
    ),
    (
        lambda r: change(r, datatype="FOO"),
        UNKNOWN_ID + "inference input 'A' data-type is '<invalid>', but model 'm' expects 'FP32'",
    ),
    (
        lambda r: change(r, name="Z"),
        "unexpected inference input 'Z' for model 'm': its inputs are 'A', 'B'",
    ),
    (lambda r: change(r, name="B"), UNKNOWN_ID + "input 'B' already exists in request"),
    (lambda r: r.outputs.add(name="Z"), NO_OUTPUT),
    (
        two(lambda r: change(r, name="Z"), lambda r: r.outputs.add(name="Z")),
        NO_OUTPUT,
    ),
    (
        on("outputs", "classification", "string_param", "2"),
        "invalid value type for 'classification' parameter, expected int64_param",
    ),
    (
        on("outputs", "classification", "int64_param", 0),
        "invalid value for 'classification' parameter, expected >= 0",
    ),
    (
        two(on("outputs", "classification", "int64_param", 1), lambda r: region(r.outputs[0])),
        "output can't set both 'shared_memory_region' and 'classification'",
    ),
    (
        lambda r: region(r.inputs[1], size=None),
        (
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for "
            "tensor 'B'"
        ),
    ),
    (
        on("outputs", "shared_memory_byte_size", "int64_param", 16),
        (
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for "
            "tensor 'X'"
        ),
    ),
    (
        on("inputs", "shared_memory_region", "int64_param", 3),
        (
            "invalid value type for 'shared_memory_region' parameter for tensor 'A', expected "
            "string_param."
        ),
    ),
    (
        two(without_raw, lambda r: region(r.inputs[0])),
        "unexpected 'content' provided when using shared memory for input tensor 'A' for model 'm'",
    ),
    (parameter("triton_x", "int64_param", 1), RESERVED),
    (two(parameter("triton_x", "int64_param", 1), lambda r: r.raw_input_contents.pop()), RESERVED),
    (
        parameter("priority", "int64_param", -1),
        "invalid value for 'priority', expected value >= 0.",
    ),
    (
        lambda r: r.parameters["foo"].SetInParent(),
        "invalid value type for 'foo' parameter, expected int64_param, bool_param, or string_param.",
    ),
]


@pytest.mark.parametrize(("edit", "text"), REFUSED)
def test_tritons_words(edit, text):
    assert refusal(edited(edit)) == ("INVALID_ARG", text)


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("triton_enable_empty_final_response", "int64_param", 1, "bool_param"),
        ("sequence_id", "bool_param", True, "int64_param or string_param"),
        ("sequence_start", "int64_param", 1, "bool_param"),
        ("priority", "bool_param", True, "int64_param or uint64_param"),
        ("timeout", "uint64_param", 5, "int64_param"),
        ("foo", "uint64_param", 5, "int64_param, bool_param, or string_param"),
    ],
)
def test_parameters_of_another_type_are_refused_in_tritons_words(name, field, value, expected):
    text = f"invalid value type for '{name}' parameter, expected {expected}."
    assert refusal(edited(parameter(name, field, value))) == ("INVALID_ARG", text)


@pytest.mark.parametrize(
    "edit", [lambda r: region(r.inputs[0]), lambda r: region(r.outputs.add(name="X"))]
)
def test_shared_memory_that_is_not_there(edit):
    assert refusal(edited(edit)) == ("NOT_FOUND", "Unable to find shared memory region: 'reg'")


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_typed_field(datatype):
    expected = (
        f"unexpected explicit tensor data for input tensor '{datatype}' for model 'm' of type 'FP32', "
        f"expected datatype '{datatype}'"
    )
    assert refusal(typed(datatype, "fp32_contents", [1]), IDENTITY) == ("INVALID_ARG", expected)


def test_strings_that_are_none():
    request = raw(("BYTES", "BYTES", [2], b"\1\0\0\0a"), id="k")
    text = "[request id: k] expected 2 string elements for inference input 'BYTES' for model 'm', got 1"
    assert refusal(request, IDENTITY) == ("INVALID_ARG", text)


def test_typed_strings_of_a_wrong_number():
    text = (
        UNKNOWN_ID + "expected 3 string elements for inference input 'BYTES' for model 'm', got 2"
    )
    request = typed("BYTES", "bytes_contents", [b"a", b""], 3)
    assert refusal(request, IDENTITY) == ("INVALID_ARG", text)


def test_a_batch_too_large():
    _, text = refusal(raw(("A", "FP32", [9, 4], bytes(144))), BATCHED)
    assert text == UNKNOWN_ID + "inference request batch-size must be <= 8 for 'm'"


def test_an_unknown_model_is_what_the_finder_says():
    assert refusal(Request(model_name="nope")) == ("NOT_FOUND", "no 'nope'")
