"""JSON and binary data of requests: taken within bounds, or refused with an error of ours."""

import os
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import example, given

from gpubridge.config import HttpConnections
from gpubridge.dataplane import InferTargets, TraceSampling
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.workers import Workers
from gpubridge.frontend.http.connection import HttpConnection, HttpListener
from gpubridge.frontend.http.message import HttpSettings
from gpubridge.frontend.infer import InferEndpoint
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.host_shm import Budget
from gpubridge.protocol.generate import parse_generate
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.transport.context import RequestContext, context_codec
from gpubridge.transport.signatures import SignatureCache, decode_shapes
from tests.fuzz.budget import fuzzed, mutations
from tests.fuzz.json_values import PARAMETERS, SIZES, VALUES, json_bytes
from tests.fuzz.refusals import tried
from tests.unit.http_endpoint import Transport
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
_NAMES = ["A", "S", "D", "OUT", "", *DATATYPES]

_TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(_NAMES), "datatype": st.sampled_from([*DATATYPES, "X"])},
    optional={
        "shape": st.one_of(st.lists(SIZES, max_size=3), VALUES),
        "data": VALUES,
        "parameters": st.one_of(PARAMETERS, VALUES),
    },
)
_DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.one_of(st.lists(_TENSORS, max_size=3), VALUES)},
    optional={
        "id": VALUES,
        "outputs": st.one_of(st.lists(_TENSORS, max_size=2), VALUES),
        "parameters": st.one_of(PARAMETERS, VALUES),
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


_BODIES = st.one_of(
    _right().map(lambda right: (json_bytes(right[0]), right[1])),
    st.tuples(
        mutations(_right().map(lambda right: json_bytes(right[0])), 2), st.binary(max_size=30)
    ),
    st.tuples(_right(), st.integers(0, 9)).map(
        lambda cut: (json_bytes(cut[0][0]), cut[0][1][: cut[1]] + cut[0][1][cut[1] + 1 :])
    ),
    st.tuples(_DOCUMENTS.map(json_bytes), st.binary(max_size=30)),
    st.tuples(
        st.tuples(
            st.one_of(st.sampled_from([0, 4080, 4088, 4096]), SIZES),
            st.one_of(st.just(16), SIZES, VALUES),
        ).map(lambda numbers: json_bytes(_shared(numbers))),
        st.just(b""),
    ),
    st.tuples(VALUES.map(json_bytes), st.binary(max_size=5)),
    st.tuples(st.binary(max_size=40), st.binary(max_size=40)),
)


@pytest.fixture(scope="module")
def memory():
    """An arena, and a client's region ``x`` of a page."""
    key = f"gpubridge-fuzz-{os.getpid()}"
    Path("/dev/shm", key).write_bytes(bytes(4096))
    try:
        every = Regions(1 << 24)
        registry = ClientRegions(every, DeviceManager(0), allowed=True, most=4)
        registry.register("x", key, 0, 4096)
        yield RequestMemory(every, registry)
        registry.close()
        every.close()
    finally:
        Path("/dev/shm", key).unlink()


class _Model:
    """Takes requests, looks at all that they say, and gives their memory back."""

    traces = SimpleNamespace(sampling=TraceSampling())
    name = "m"
    version = 1

    def __init__(self, config, arena):
        self.config = config
        self.arena = arena
        self.seen = None
        self.signatures = SignatureCache()
        self.statistics = ModelStatistics("m", 1)

    def submit(self, request, received=None):
        signature = self.signatures[request.signature]
        shapes = decode_shapes(signature, request.dims)
        self.seen = []
        if request.ranges is not None:
            assert len(signature.tensors) == len(request.ranges)
            for segment, offset, nbytes, _ in request.ranges:
                assert segment is None or 0 <= offset <= offset + nbytes <= segment.size
            return self.free(request)
        memory = request.slot.memory if request.slot is not None else memoryview(b"")
        assert len(signature.tensors) == len(request.places)
        end = 0
        tensors = zip(signature.tensors, shapes, request.places, strict=True)
        for spec, shape, (at, nbytes) in tensors:
            begin = request.start + at
            assert 0 <= begin <= begin + nbytes <= len(memory) or not nbytes
            assert begin >= end or not nbytes
            end = max(end, begin + nbytes)
            self.seen.append(bytes(memory[begin : begin + nbytes]))
            if spec.datatype != "BYTES":
                assert nbytes == spec.nbytes(shape)
                assert (
                    not nbytes or begin % np.dtype(numpy_dtype(spec.datatype) or "u2").itemsize == 0
                )
        context_codec(RequestContext).decode(request.context.encoded())
        request.identifier.encode()
        return self.free(request)

    def free(self, request):
        slot, request.slot = request.slot, None
        if slot is not None:
            self.arena.free(slot)


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
@example(
    0,
    (
        b'{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}',
        b"abcd",
    ),
    "right",
)
def test_a_body_is_a_request_within_its_memory_or_refused(memory, which, parts, size):
    model = _Model(CONFIGS[which], memory.arenas.arena("m"))
    endpoint = InferEndpoint(model, memory, None)
    header, following = parts
    length = b"%d" % len(header) if size == "right" else size
    for _ in range(2):
        # Twice: the second finds the form of the first.
        model.seen = None
        _, refusal = tried(_send, endpoint, header + following, length)
        assert (refusal is None) == (model.seen is not None)
        assert memory.arenas.arena("m").lent() == (0, 0)
    if refusal is None and size == "right" and header:
        # Its form is known now, and this is no body of that form.
        _, refusal = tried(_send, endpoint, header + following + b"x", length)
        assert refusal is not None
        assert memory.arenas.arena("m").lent() == (0, 0)
    header, data = _good(model.config)
    _send(endpoint, header + data, b"%d" % len(header))
    assert model.seen == [data]
    assert memory.arenas.arena("m").lent() == (0, 0)


class _Router:
    """Sends every request to one endpoint, and keeps the error that is the answer."""

    def __init__(self, endpoint):
        self.route = endpoint.request
        self.error = None
        self.targets = InferTargets()
        self.targets.add(b"/infer", endpoint)

    def failure(self, error, status, _):
        self.error = error
        return 400, [b"{}"]


def _send(endpoint, body, length):
    """Send a request to an endpoint; raises the error that it is answered with."""
    router = _Router(endpoint)
    settings = HttpSettings(1 << 20, HttpConnections())
    listener = HttpListener(router, settings, Workers(), Budget(1 << 24), router.targets)
    connection = HttpConnection(listener, set())
    connection.connection_made(Transport())
    field = b"" if length is None else b"Inference-Header-Content-Length: %b\r\n" % length
    sent = b"POST /infer HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (field, len(body), body)
    while sent:
        buffer = memoryview(connection.get_buffer(-1))
        taken = min(len(buffer), len(sent))
        buffer[:taken] = sent[:taken]
        sent = sent[taken:]
        connection.buffer_updated(taken)
    connection.connection_lost(None)
    if router.error is not None:
        raise router.error


def _good(config):
    """The header and the data of a request that is right: the first input, as small as it may be."""
    spec = config.inputs[0]
    shape = [abs(dim) for dim in spec.dims]
    if config.max_batch_size:
        shape = [1, *shape]
    data = b"\1\0\0\0x"
    if spec.datatype != "BYTES":
        data = b"\1" * (np.dtype(numpy_dtype(spec.datatype)).itemsize * int(np.prod(shape)))
    entry = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
    entry["parameters"] = {"binary_data_size": len(data)}
    return json_bytes({"inputs": [entry]}), data


def test_forms_that_are_remembered_have_a_limit(memory):
    endpoint = InferEndpoint(_Model(CONFIGS[0], memory.arenas.arena("m")), memory, None)
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
        endpoint.served.forms.parse(orjson.dumps(document), 0)
    assert len(endpoint.served.templates) == 1


_FLAT = st.dictionaries(
    st.sampled_from([*_NAMES, "id", "parameters", "any"]), st.one_of(VALUES, PARAMETERS)
)


@fuzzed(3)
@given(
    st.sampled_from(CONFIGS),
    st.one_of(_FLAT.map(json_bytes), mutations(_FLAT.map(json_bytes), 2), st.binary(max_size=30)),
)
def test_a_flat_request_is_understood_or_refused(config, body):
    form, refusal = tried(parse_generate, body, config)
    if refusal is not None:
        return
    decode_shapes(SignatureCache()[form.signature], form.dims)
    assert all(entry.data is not None and len(entry.data) == entry.nbytes for entry in form.inputs)
    assert all(nbytes >= 0 for _, nbytes in form.places)
