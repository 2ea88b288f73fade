"""Requests of many tensors: what is done for them grows with their number, not with its square.

Counted are lines of Python that are executed, and comparisons of names, never time.
"""

import contextlib
import functools
import sys
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError
from gpubridge.model_io import as_configured, check_inputs, model_shape
from gpubridge.pb_utils.response import find_tensor
from gpubridge.protocol import generate
from gpubridge.protocol.grpc import infer_response as grpc_response
from gpubridge.protocol.grpc.infer_request import RequestHead, build_form
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response
from gpubridge.protocol.request_form import InputForm
from gpubridge.request import InferResponse
from gpubridge.schema import message_class
from gpubridge.stub.memory import output_aliasing
from gpubridge.stub.memory.client_memory import target_of
from gpubridge.stub.response_encoder import OutputCheck, ResponseEncoder
from gpubridge.tensor.native import native
from gpubridge.transport.context import RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import SignatureCache, decode_shapes, encode_tensors
from gpubridge.transport.stub_settings import StubModel, StubSettings
from tests.unit.model_configs import model_config

FEW, MANY = 48, 500
SETTINGS = StubSettings(StubModel("m", 1, "python", "", "", ()), "m_0_0", {"model_config": "{}"})
MOST_TIMES = 12
"""So many times what 48 tensors cost may 500 cost."""


class Name(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def lines_of(function):
    """Return how many lines of Python a call executes."""
    count = 0

    def line(frame, event, argument):
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def compared_by(function):
    Name.compared = 0
    function()
    return Name.compared


@functools.cache
def config_of(count):
    inputs = ";".join(f"IN{i} FP32 [4] reshape {{ shape: [2, 2] }}" for i in range(count))
    outputs = ";".join(f"OUT{i} FP32 [4] reshape {{ shape: [2, 2] }}" for i in range(count))
    return model_config(inputs, outputs)


def names_of(prefix, count):
    return [Name(f"{prefix}{i}") for i in range(count)]


def http_request(count, config):
    document = {
        "inputs": [
            {
                "name": f"IN{i}",
                "datatype": "FP32",
                "shape": [4],
                "parameters": {"binary_data_size": 16},
            }
            for i in range(count)
        ],
        "outputs": [{"name": f"OUT{i}", "parameters": {"binary_data": True}} for i in range(count)],
    }
    raw = orjson.dumps(document)
    return lambda: parse_request(raw, config, 16 * count)


def grpc_request(count, config):
    message = message_class("ModelInferRequest")(model_name="m")
    for i in range(count):
        message.inputs.add(name=f"IN{i}", datatype="FP32", shape=[4])
        message.outputs.add(name=f"OUT{i}")
    head = RequestHead(b"", "", (16,) * count, [16 * i for i in range(count)])
    return lambda: build_form(message, head, config)


def response_of(count):
    raw, dims = encode_tensors([(f"OUT{i}", "FP32", [2, 2]) for i in range(count)])
    signature = SignatureCache()[raw]
    return InferResponse(signature, decode_shapes(signature, dims), [memoryview(bytes(16))] * count)


def http_response(count, config):
    form, response = http_request(count, config)(), response_of(count)
    return lambda: encode_response(form, "", response, config, 1)


def grpc_response_of(count, config):
    form, response = grpc_request(count, config)()[0], response_of(count)
    return lambda: grpc_response.encode_response(form, "", response, config, 1)


def inputs_by_name(count, _config):
    tensors = [SimpleNamespace(_name=f"IN{i}") for i in range(count)]
    request = SimpleNamespace(_inputs=tensors)

    def look_up():
        for i in range(count):
            assert find_tensor(request, tensors, f"IN{i}") is tensors[i]

    return look_up


def passed_on(count, _config):
    nbytes = 1 << 16
    memory = np.zeros(count * nbytes, np.uint8)
    outputs = [
        pb_utils.Tensor(f"OUT{i}", memory[i * nbytes : (i + 1) * nbytes]) for i in range(count)
    ]
    borrowed = SimpleNamespace(segment=lambda region: SimpleNamespace(view=memory.data))
    refs = [(0, i * nbytes, nbytes, 0) for i in range(count)]
    record = Record(0, None, (), RequestContext(), 0, "", refs)

    def place():
        passing = output_aliasing.OutputAliasing(None, borrowed)
        fields, free = passing.finish(*passing.place(record, outputs), "", memoryview(bytes(1)))
        assert free
        assert fields == [field for ref in refs for field in ref]

    return place


def client_targets(count, _config):
    places = {f"OUT{i}": [1, 0, 16] for i in range(count)}
    record = Record(0, None, (), RequestContext(client={"in": [], "out": places}), 0, "", ())
    return lambda: [target_of(record, name) for name in places]


@pytest.mark.parametrize(
    "work",
    [
        http_request,
        grpc_request,
        http_response,
        grpc_response_of,
        inputs_by_name,
        passed_on,
        client_targets,
    ],
)
def test_lines_grow_with_the_number_of_tensors(work):
    few, many = (lines_of(work(count, config_of(count))) for count in (FEW, MANY))
    assert few > FEW
    assert many <= MOST_TIMES * few


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_generate_body_is_not_searched_for_every_name(count):
    class Body(bytes):
        searches = 0

        def count(self, *arguments):
            Body.searches += 1
            return bytes.count(self, *arguments)

    document = {f"IN{i}": 1 for i in range(count)}
    config = config_of(count)
    for body in (orjson.dumps(document), orjson.dumps(document)[:-1] + b',"IN0":2}'):
        Body.searches = 0
        with contextlib.suppress(BridgeError):
            generate.parse_generate(Body(body), config)
        assert Body.searches <= FEW
    with pytest.raises(BridgeError, match="IN0"):
        generate.parse_generate(Body(body), config)


@pytest.mark.parametrize("twice", [False, True])
def test_names_of_inputs_are_looked_up(twice):
    compared = []
    for count in (FEW, MANY):
        config = config_of(count)
        names = names_of("IN", count)
        if twice:
            names[-1] = Name("IN0")
        inputs = [InputForm(name, "FP32", (4,), 16) for name in names]

        def check(inputs=inputs, config=config):
            if twice:
                with pytest.raises(BridgeError, match="input 'IN0' already exists in request"):
                    check_inputs("", inputs, config)
                return
            check_inputs("", inputs, config)
            assert all(model_shape(entry, config) == (2, 2) for entry in inputs)

        compared.append(compared_by(check))
    few, many = compared
    assert few >= FEW * (not twice)
    assert many <= MOST_TIMES * max(few, FEW)


def outputs_as_configured(count):
    config, names = config_of(count), names_of("OUT", count)
    return lambda: [as_configured(name, (2, 2), config) for name in names]


def outputs_that_are_asked_for(count):
    names = names_of("OUT", count)
    raw, _ = encode_tensors([], [str(name) for name in names])
    record = Record(0, SignatureCache()[raw], (), RequestContext(), 0, "", ())
    tensors = [SimpleNamespace(_name=name, _datatype="FP32", _shape=(4,)) for name in names]
    response = SimpleNamespace(_error=None, _parameters="{}", _tensors=tensors)
    encoder = object.__new__(ResponseEncoder)
    encoder._states, encoder._signatures = None, {}
    encoder._identity = SimpleNamespace(check=OutputCheck(SETTINGS, None))

    def form():
        assert len(encoder._form(record, response)[0]) == count

    return form


def index_of_the_compiled_lookup(count):
    if native() is None:
        pytest.skip("no compiled module")
    tensors = [pb_utils.Tensor(f"T{i}", np.zeros(1)) for i in range(count)]
    for tensor, name in zip(tensors, names_of("T", count), strict=True):
        tensor._name = name
    response = pb_utils.InferenceResponse(tensors)

    def look_up():
        for i, tensor in enumerate(tensors):
            assert pb_utils.get_output_tensor_by_name(response, f"T{i}") is tensor

    return look_up


@pytest.mark.parametrize(
    "work", [outputs_as_configured, outputs_that_are_asked_for, index_of_the_compiled_lookup]
)
def test_names_are_looked_up(work):
    few, many = (compared_by(work(count)) for count in (FEW, MANY))
    assert few >= FEW
    assert many <= MOST_TIMES * few


@pytest.mark.parametrize("count", [3, 8, 9, 500])
@pytest.mark.parametrize("compiled", [True, False])
def test_tensors_are_found_by_name_however_many_there_are(count, compiled):
    if compiled and native() is None:
        pytest.skip("no compiled module")
    inputs = [pb_utils.Tensor(f"T{i}", np.zeros(1)) for i in range(count)]
    inputs.append(pb_utils.Tensor("T1", np.ones(1)))
    request = pb_utils.InferenceRequest(inputs=inputs, requested_output_names=[], model_name="m")
    response = pb_utils.InferenceResponse(inputs)
    if compiled:
        finds = [
            lambda name: pb_utils.get_input_tensor_by_name(request, name),
            lambda name: pb_utils.get_output_tensor_by_name(response, name),
        ]
    else:
        held = SimpleNamespace()
        finds = [lambda name: find_tensor(held, inputs, name)]
    for find in finds:
        for _ in range(2):
            assert [find(f"T{i}") for i in range(count)] == inputs[:count]
            for absent in ("T", "", None, 5, b"T0", ["T0"]):
                assert find(absent) is None
