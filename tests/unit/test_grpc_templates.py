"""Templates of gRPC requests: whatever they remember, a message means what protobuf reads in it."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given, strategies as st

from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Account, Body, Budget
from gpubridge.protocol.grpc.infer_request import FormCache
from gpubridge.protocol.grpc.receiver import RequestReceiver, whole_request
from tests.fuzz.budget import fuzzed
from tests.unit.grpc_requests import BATCHED, Model, Request, inputs_of, raw
from tests.unit.model_configs import model_config

MODELS = [
    Model(model_config("A FP32 [-1];S STRING [-1] optional: true", "X FP32 [-1];Y FP32 [-1]")),
    Model(
        model_config(
            "A FP32 [-1] reshape { shape: [1,-1] };S STRING [-1] optional: true",
            "X FP32 [-1];Y FP32 [-1]",
            "max_batch_size: 4",
        )
    ),
]


@pytest.fixture(scope="module")
def arena():
    regions = Regions(1 << 24)
    arena = regions.arena("m")
    yield arena
    assert arena.lent() == (0, 0)
    regions.close()


def cache(model, arena):
    def find(name, version):
        if name != "m":
            raise BridgeError(f"no {name!r} {version!r}", ErrorCode.NOT_FOUND)
        return model

    return FormCache(find, lambda _: arena, lambda region: None)


def outcome(message, forms, arena):
    """Return the request that a message becomes, or its error."""
    try:
        known, made, regions = whole_request(message, forms, lambda _: None)
    except BridgeError as error:
        return error.code, error.message
    return told(known, made, regions, arena)


def told(known, made, regions, arena):
    try:
        return (
            made.signature,
            made.dims,
            tuple(made.places),
            made.identifier,
            made.context.encoded(),
            made.batch_size,
            astuple(replace(made.options, shapes=tuple(made.options.shapes), shape_id=None)),
            made.copied,
            regions,
            known.empty_final_response,
            {name: output.classes for name, output in (known.form.outputs or {}).items()},
            inputs_of(made),
        )
    finally:
        arena.free(made.slot)


NUMBERS = st.sampled_from([0, 1, 2, 127, 128, (1 << 63) - 1, -1])
TEXTS = st.one_of(st.text(max_size=4), st.sampled_from(["", "é" * 70, "a" * 128]))


@st.composite
def skeletons(draw):
    return {
        "inputs": draw(st.lists(st.sampled_from("AS"), unique=True, min_size=1)),
        "shared": draw(st.sampled_from([(), (0,), (0, 1)])),
        "outputs": draw(st.lists(st.sampled_from("XY"), max_size=2)),
        "classes": draw(st.booleans()),
        "parameters": draw(
            st.lists(
                st.sampled_from(
                    [
                        ("priority", "int64_param"),
                        ("priority", "uint64_param"),
                        ("timeout", "int64_param"),
                        ("sequence_id", "int64_param"),
                        ("sequence_id", "string_param"),
                        ("sequence_start", "bool_param"),
                        ("mine", "int64_param"),
                        ("other", "string_param"),
                        ("real", "double_param"),
                        ("wide", "uint64_param"),
                        ("triton_enable_empty_final_response", "bool_param"),
                    ]
                ),
                unique_by=lambda parameter: parameter[0],
                max_size=3,
            )
        ),
    }


VALUES = {
    "int64_param": NUMBERS,
    "uint64_param": st.sampled_from([0, 1, 1 << 63]),
    "string_param": TEXTS,
    "bool_param": st.booleans(),
    "double_param": st.sampled_from([0.0, 1.5, float("inf")]),
}


@st.composite
def requests(draw, skeleton, model):
    request = Request(model_name="m", id=draw(TEXTS))
    batch = draw(st.integers(0, 5)) if model.config.max_batch_size else 0
    for index, name in enumerate(skeleton["inputs"]):
        n = draw(st.integers(0, 3))
        shape = [batch, n] if model.config.max_batch_size else [n]
        count = n * batch if model.config.max_batch_size else n
        if name == "A":
            data = bytes(4 * count)
        else:
            data = b"".join(bytes([i, 0, 0, 0]) + b"x" * i for i in range(count))
        entry = request.inputs.add(
            name=name, datatype="FP32" if name == "A" else "BYTES", shape=shape
        )
        if index in skeleton["shared"]:
            entry.parameters["shared_memory_region"].string_param = draw(TEXTS)
            entry.parameters["shared_memory_byte_size"].int64_param = len(data)
            entry.parameters["shared_memory_offset"].int64_param = draw(NUMBERS)
        else:
            request.raw_input_contents.append(data[: draw(st.sampled_from([None, None, None, 3]))])
    for name in skeleton["outputs"]:
        entry = request.outputs.add(name=name)
        if skeleton["classes"]:
            entry.parameters["classification"].int64_param = draw(st.sampled_from([1, 2]))
        elif skeleton["shared"]:
            entry.parameters["shared_memory_region"].string_param = draw(TEXTS)
            entry.parameters["shared_memory_byte_size"].int64_param = draw(NUMBERS)
    for name, field in skeleton["parameters"]:
        setattr(request.parameters[name], field, draw(VALUES[field]))
    return request.SerializeToString(deterministic=True)


@given(st.data())
def test_a_message_means_the_same_with_and_without_templates(arena, data):
    model = data.draw(st.sampled_from(MODELS))
    skeleton = data.draw(skeletons())
    forms = cache(model, arena)
    for _ in range(4):
        message = data.draw(requests(skeleton, model))
        assert outcome(message, forms, arena) == outcome(message, cache(model, arena), arena)


@fuzzed(2)
@given(st.data())
def test_no_change_of_the_bytes_gives_another_outcome(arena, data):
    model = data.draw(st.sampled_from(MODELS))
    forms = cache(model, arena)
    message = data.draw(requests(data.draw(skeletons()), model))
    outcome(message, forms, arena)
    for _ in range(8):
        at = data.draw(st.integers(0, len(message)))
        gone = data.draw(st.integers(0, 2))
        changed = message[:at] + data.draw(st.binary(max_size=2)) + message[at + gone :]
        assert outcome(changed, forms, arena) == outcome(changed, cache(model, arena), arena)


def two(count=4, **fields):
    return raw(
        ("A", "FP32", [count], b"\1" * 4 * count), ("S", "BYTES", [1], b"\1\0\0\0x"), **fields
    )


def taken(first, second, arena, model=MODELS[0]):
    """Return whether two messages share a template; both are parsed correctly in any case."""
    forms = cache(model, arena)
    outcome(first, forms, arena)
    assert outcome(second, forms, arena) == outcome(second, cache(model, arena), arena)
    made = forms.templates.take_message(second, lambda _: None)
    if made is not None:
        arena.free(made[1].slot)
    return made is not None and len(forms.templates) == 1


def test_ids_dims_sizes_and_values_may_differ(arena):
    def message(number):
        request = two(number, id="x" * number)
        request.parameters["timeout"].int64_param = number
        request.parameters["sequence_id"].string_param = f"s{number}"
        request.parameters["sequence_start"].bool_param = True
        request.parameters["mine"].string_param = "é" * number
        request.parameters["n"].int64_param = number
        return request.SerializeToString(deterministic=True)

    for number in range(30):
        assert taken(message(1), message(number), arena)


def test_a_shape_that_is_not_packed_is_the_same_shape(arena):
    entry = b"\x0a\x01A\x12\x04FP32"
    packed, single = entry + b"\x1a\x01\x02", entry + b"\x18\x02"
    messages = [
        b"\x0a\x01m*%c" % len(content) + content + b"\x3a\x08" + bytes(8)
        for content in (packed, single)
    ]
    assert taken(*messages, arena)


@pytest.mark.parametrize(
    "extra",
    [
        b"\x0a\x01m",  # the name again
        b"\x1a\x01x\x1a\x01y",  # two ids
        b"\xa0\x06\x01",  # an unknown field
        b"\x22\x06\x0a\x01a\x12\x01\x18",  # a parameter cut short
        b"\x3a\x00",  # one raw content more
    ],
)
def test_messages_that_only_protobuf_reads_have_no_template(arena, extra):
    first = two().SerializeToString()
    assert taken(first, first, arena)
    assert not taken(first, first + extra, arena)


def test_templates_of_models_that_changed_are_forgotten(arena):
    forms = cache(MODELS[0], arena)
    message = two().SerializeToString()
    outcome(message, forms, arena)
    assert len(forms.templates) == 1
    forms.forget(lambda model: model is not MODELS[0])
    assert len(forms.templates) == 1
    forms.forget(lambda model: model is MODELS[0])
    assert len(forms.templates) == 0


def test_a_message_that_comes_in_pieces_uses_the_same_template(arena):
    forms = cache(MODELS[0], arena)
    outcome(two(1).SerializeToString(), forms, arena)
    message = two(5, id="later").SerializeToString()
    receiver = RequestReceiver(
        len(message), lambda _: arena, Body(Budget(1 << 24), Account(lambda: 0), lambda _: None)
    )
    receiver.feed(memoryview(message))
    known, made, regions = receiver.request(forms, lambda _: None)
    receiver.close()
    assert len(forms.templates) == 1
    assert told(known, made, regions, arena) == outcome(message, cache(MODELS[0], arena), arena)


def test_a_batch_that_is_too_large_is_refused_in_words(arena):
    forms = cache(BATCHED, arena)
    outcome(raw(("A", "FP32", [3, 4], bytes(48))).SerializeToString(), forms, arena)
    code, text = outcome(raw(("A", "FP32", [9, 4], bytes(144))).SerializeToString(), forms, arena)
    assert (code, text) == (
        ErrorCode.INVALID_ARG,
        "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'",
    )
