"""JSON and binary data of requests: taken within bounds, or refused with an error of ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import example, given

from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.devices.memory import DeviceMemory
from gpubridge.engine.regions import Regions
from gpubridge.errors import BridgeError
from gpubridge.frontend.http.message import RequestHead
from gpubridge.frontend.infer import InferDoor
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol.classification import classified
from gpubridge.protocol.generate import encode_generated, parse_generate
from gpubridge.protocol.grpc.settings import (
    log_changes as grpc_log_changes,
    trace_changes as grpc_trace_changes,
)
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response
from gpubridge.protocol.settings import log_changes, trace_changes
from gpubridge.request import InferResponse
from gpubridge.tensor.dtypes import DATATYPES, numpy_dtype
from gpubridge.transport.signatures import Signature, SignatureCache, TensorSpec
from tests.fuzz.budget import fuzzed, mutations
from tests.unit.model_configs import model_config

_ALL = ";".join(
    f"{kind} {'STRING' if kind == 'BYTES' else kind} {dims} optional: true"
    for kind, dims in zip(DATATYPES, ["[-1]", "[-1, -1]", "[ 2 ]"] * 9, strict=False)
)
CONFIGS = [
    model_config("A FP32 [-1];S STRING [-1] optional: true;D FP64 [2] optional: true"),
    model_config("A FP32 [-1]", more="max_batch_size: 4"),
    model_config("S STRING [1]"),
    model_config("A FP32 [-1, -1] reshape { shape: [-1, -1, 1] }"),
    model_config(_ALL, "OUT FP32 [-1]"),
]
_NO_INPUTS = model_config("A FP32 [-1] optional: true")
_NAMES = ["A", "S", "D", "OUT", "", *DATATYPES]

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 1 << 63, (1 << 64) - 1, 1e400, "", "a", "\ud800", "\0"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "parameters", "data"]), inner, max_size=2),
    ),
    max_leaves=8,
)
_SIZES = st.sampled_from([0, 1, 2, 4, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
_PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "binary_data_size",
            "binary_data",
            "binary_data_output",
            "classification",
            "shared_memory_region",
            "shared_memory_byte_size",
            "shared_memory_offset",
            "sequence_id",
            "sequence_start",
            "timeout",
            "priority",
            "triton_x",
            "any",
        ]
    ),
    st.one_of(_SIZES, _VALUES),
    max_size=3,
)
_TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(_NAMES), "datatype": st.sampled_from([*DATATYPES, "X"])},
    optional={
        "shape": st.one_of(st.lists(_SIZES, max_size=3), _VALUES),
        "data": _VALUES,
        "parameters": st.one_of(_PARAMETERS, _VALUES),
    },
)
_DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.one_of(st.lists(_TENSORS, max_size=3), _VALUES)},
    optional={
        "id": _VALUES,
        "outputs": st.one_of(st.lists(_TENSORS, max_size=2), _VALUES),
        "parameters": st.one_of(_PARAMETERS, _VALUES),
    },
)


@st.composite
def _right(draw):
    """Documents that are right, and the bytes that follow them."""
    count = draw(st.sampled_from([0, 1, 3]))
    binary = draw(st.booleans())
    entry = {"name": "A", "datatype": "FP32", "shape": [count]}
    text = {"name": "S", "datatype": "BYTES", "shape": [1]}
    following = b""
    if binary:
        entry["parameters"] = {"binary_data_size": 4 * count}
        following += b"abcd" * count
    else:
        entry["data"] = [1.5] * count
    inputs = [entry]
    if draw(st.booleans()):
        text["parameters"] = {"binary_data_size": 7}
        inputs.append(text)
        following += b"\3\0\0\0abc"
    if draw(st.booleans()):
        inputs.append(
            {"name": "D", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": 16}}
        )
        following += b"d" * 16
    return {"inputs": inputs, "id": draw(st.sampled_from(["", "7"]))}, following


def _shared(numbers):
    offset, nbytes = numbers
    place = {
        "shared_memory_region": "x",
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }
    entry = {"name": "A", "datatype": "FP32", "shape": [4], "parameters": place}
    return {"inputs": [entry], "outputs": [{"name": "OUT", "parameters": place}]}


def _json(document):
    # With what is no JSON but comes all the same: NaN, lone surrogates, large numbers.
    return json.dumps(document).encode()


_BODIES = st.one_of(
    _right().map(lambda right: (_json(right[0]), right[1])),
    st.tuples(mutations(_right().map(lambda right: _json(right[0])), 2), st.binary(max_size=30)),
    st.tuples(_right(), st.integers(0, 9)).map(
        lambda cut: (_json(cut[0][0]), cut[0][1][: cut[1]] + cut[0][1][cut[1] + 1 :])
    ),
    st.tuples(_DOCUMENTS.map(_json), st.binary(max_size=30)),
    st.tuples(
        st.tuples(
            st.one_of(st.sampled_from([0, 4080, 4088, 4096]), _SIZES),
            st.one_of(st.just(16), _SIZES, _VALUES),
        ).map(lambda numbers: _json(_shared(numbers))),
        st.just(b""),
    ),
    st.tuples(_VALUES.map(_json), st.binary(max_size=5)),
    st.tuples(st.binary(max_size=40), st.binary(max_size=40)),
)


@pytest.fixture(scope="module")
def memory():
    """An arena, and a client's region ``x`` of a page."""
    key = f"gpubridge-fuzz-{os.getpid()}"
    Path("/dev/shm", key).write_bytes(bytes(4096))
    try:
        every = Regions(1 << 24)
        registry = ClientRegions(every, DeviceMemory(0), allowed=True, most=4)
        registry.register("x", key, 0, 4096)
        yield RequestMemory(every.arena, registry)
        registry.close()
        every.close()
    finally:
        Path("/dev/shm", key).unlink()


class _Model:
    """Takes requests, looks at all that they say, and gives their memory back."""

    traces = type("Traces", (), {"active": False})()
    name = "m"
    version = 1

    def __init__(self, config, arena):
        self.config = config
        self.arena = arena
        self.signatures = SignatureCache()

    def submit(self, request, received=None):
        signature = self.signatures[request.signature]
        if request.ranges is not None:
            assert len(signature.tensors) == len(request.ranges)
            for segment, offset, nbytes, _ in request.ranges:
                assert segment is None or 0 <= offset <= offset + nbytes <= segment.size
            return self.free(request)
        memory = request.slot.memory if request.slot is not None else memoryview(b"")
        assert len(signature.tensors) == len(request.places)
        end = 0
        for spec, (at, nbytes) in zip(signature.tensors, request.places, strict=True):
            begin = request.start + at
            assert 0 <= begin <= begin + nbytes <= len(memory) or not nbytes
            assert begin >= end or not nbytes
            end = max(end, begin + nbytes)
            if spec.datatype != "BYTES":
                assert nbytes == spec.nbytes
                assert (
                    not nbytes or begin % np.dtype(numpy_dtype(spec.datatype) or "u2").itemsize == 0
                )
        if request.extras:
            orjson.loads(request.extras)
        request.identifier.encode()
        return self.free(request)

    def free(self, request):
        slot, request.slot = request.slot, None
        if slot is not None:
            self.arena.free(slot)


class _Exchange:
    """Nobody looks at answers here: models give none."""


@fuzzed(5)
@given(
    st.integers(0, len(CONFIGS) - 1),
    _BODIES,
    st.sampled_from(["right", "right", "right", None, b"0", b"-1", b"5", b"1_0", b"9" * 5000, b""]),
)
@example(
    3,
    (
        (
            b'{"inputs":[{"name":"A","datatype":"FP32","shape":[0,18446744073709551615],'
            b'"parameters":{"binary_data_size":0}}]}'
        ),
        b"",
    ),
    "right",
)
def test_a_body_is_a_request_within_its_memory_or_refused(memory, which, parts, size):
    arena = memory.arena
    door = InferDoor(_Model(CONFIGS[which], arena), memory)
    header, following = parts
    body = header + following
    for _ in range(2):
        # Twice: the second finds the form of the first.
        length = b"%d" % len(header) if size == "right" else size
        fields = {} if length is None else {b"inference-header-content-length": length}
        handler = door.request(RequestHead(b"POST", b"/", fields))
        try:
            if body:
                handler.body_memory(len(body))[:] = body
            handler.complete(_Exchange(), len(body))
        except BridgeError as error:
            error.message.encode(errors="strict")
            handler.abort()
        assert arena.lent() == (0, 0)


def test_forms_that_are_remembered_have_a_limit(memory):
    door = InferDoor(_Model(CONFIGS[0], memory.arena), memory)
    for number in range(3000):
        document = {
            "inputs": [
                {
                    "name": "A",
                    "datatype": "FP32",
                    "shape": [0],
                    "parameters": {"binary_data_size": 0},
                }
            ],
            "parameters": {"any": number},
        }
        door.forms.parse(orjson.dumps(document), 0)
    assert len(door.forms._forms) <= 512


_FLAT = st.dictionaries(
    st.sampled_from([*_NAMES, "id", "parameters", "any"]), st.one_of(_VALUES, _PARAMETERS)
)


@fuzzed(3)
@given(
    st.sampled_from(CONFIGS),
    st.one_of(_FLAT.map(_json), mutations(_FLAT.map(_json), 2), st.binary(max_size=30)),
)
def test_a_flat_request_is_understood_or_refused(config, body):
    try:
        form = parse_generate(body, config)
    except BridgeError as error:
        error.message.encode(errors="strict")
        return
    SignatureCache()[form.signature]
    assert all(entry.data is not None and len(entry.data) == entry.nbytes for entry in form.inputs)
    assert all(nbytes >= 0 for _, nbytes in form.places)


@fuzzed(2)
@given(
    st.sampled_from(list(DATATYPES)),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, (1 << 64) - 1),
    st.booleans(),
    st.data(),
)
def test_answers_are_encoded_in_every_form_or_refused(datatype, shape, classes, batched, data):
    count = int(np.prod(shape, dtype=int))
    if datatype == "BYTES":
        content = data.draw(st.one_of(st.just(b"\2\0\0\0\xc3\xa9" * count), st.binary(max_size=20)))
        spec = TensorSpec("OUT", datatype, tuple(shape), None)
    else:
        nbytes = count * np.dtype(numpy_dtype(datatype) or "u2").itemsize
        content = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
        spec = TensorSpec("OUT", datatype, tuple(shape), nbytes)
    config = CONFIGS[1 if batched and shape else 0]
    parameters = data.draw(st.one_of(st.none(), _PARAMETERS))
    response = InferResponse(Signature((spec,), ()), [memoryview(content)], parameters)
    form = parse_request(b'{"inputs":[]}', _NO_INPUTS, 0)
    for encode in (
        lambda: encode_response(form, response, config, 1).header,
        lambda: encode_generated(form, response, config, 1),
        lambda: classified(response, {"OUT": classes}, config),
    ):
        try:
            encode()
        except BridgeError as error:
            error.message.encode(errors="strict")


_SETTINGS = st.dictionaries(
    st.sampled_from(
        [
            "log_info",
            "log_verbose_level",
            "log_format",
            "log_file",
            "trace_level",
            "trace_rate",
            "trace_count",
            "log_frequency",
            "trace_mode",
        ]
    ),
    st.one_of(_VALUES, st.sampled_from(["-1", "5x", "9" * 5000, "٣", ["TIMESTAMPS"]])),
)


@fuzzed()
@given(st.one_of(_SETTINGS.map(_json), mutations(_SETTINGS.map(_json), 2)), st.binary(max_size=60))
def test_settings_are_understood_or_refused(document, message):
    for change, body in (
        (log_changes, document),
        (trace_changes, document),
        (grpc_log_changes, message),
        (grpc_trace_changes, message),
    ):
        try:
            change(body)
        except BridgeError as error:
            str(error.message)
