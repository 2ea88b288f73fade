"""Inference from a client to a model and back: every datatype, form and option."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import running_server, write_model

DATATYPES = [
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
]
NUMPY = {
    **{
        f"{kind}{bits}": f"{kind.lower()}{bits}"
        for kind in ("INT", "UINT")
        for bits in (8, 16, 32, 64)
    },
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BOOL": "bool",
    "BF16": ml_dtypes.bfloat16,
    "BYTES": "object",
}
IN_JSON = [name for name in DATATYPES if name not in ("FP16", "BF16")]

EVERY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.echo(t) for t in r.inputs()]) for r in requests]

    def echo(self, tensor):
        name = "OUT" + tensor.name()[2:]
        if name == "OUT_BF16":
            return pb_utils.Tensor.from_dlpack(name, tensor)
        return pb_utils.Tensor(name, tensor.as_numpy())
"""

TWO = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "A")
            y = pb_utils.get_input_tensor_by_name(request, "B")
            x = x.as_numpy()
            y = np.full_like(x, 10) if y is None else y.as_numpy()
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("SUM", x + y), pb_utils.Tensor("DIFFERENCE", x - y)]))
        return responses
"""

TELL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            told = {
                "id": request.request_id(),
                "parameters": json.loads(request.parameters()),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "outputs": sorted(request.requested_output_names()),
                "shape": [t.shape() for t in request.inputs()],
            }
            out = pb_utils.Tensor("OUT", np.array([json.dumps(told).encode()], dtype=object))
            responses.append(pb_utils.InferenceResponse([out], parameters={
                "text": "caf\\u00e9", "lone": "\\ud800", "number": -5, "huge": 10**30, "yes": True}))
        return responses
"""

SHAPES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", np.array(r.inputs()[0].shape(), dtype=np.int64))])
            for r in requests]
"""

KEEPER = """
import gc
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if len(self.kept) < 5:
                # A view of a view: the tensor and its array are gone, the memory must not be.
                self.kept.append((int(x[0]), x.reshape(-1, 2)[:, 1]))
            whole = [bool((view == first).all()) for first, view in self.kept]
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([len(whole), sum(whole)], dtype=np.int64))]))
        gc.collect()
        return responses
"""

EDITOR = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            x *= 2
            x[0] = -1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
        return responses
"""


def declare(prefix, dims="[-1]"):
    return " }, { ".join(
        f'name: "{prefix}_{name}" data_type: TYPE_{"STRING" if name == "BYTES" else name} dims: {dims}'
        + (" optional: true" if prefix == "IN" else "")
        for name in DATATYPES
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "every", EVERY, inputs=declare("IN"), outputs=declare("OUT"))
    write_model(
        repository,
        "two",
        TWO,
        config="max_batch_size: 4",
        inputs='name: "A" data_type: TYPE_FP32 dims: [2] }, { '
        'name: "B" data_type: TYPE_FP32 dims: [2] optional: true',
        outputs='name: "SUM" data_type: TYPE_FP32 dims: [2] }, { '
        'name: "DIFFERENCE" data_type: TYPE_FP32 dims: [2]',
    )
    string = 'name: "OUT" data_type: TYPE_STRING dims: [1]'
    shape = 'name: "OUT" data_type: TYPE_INT64 dims: [-1]'
    write_model(repository, "tell", TELL, outputs=string)
    write_model(
        repository,
        "reshaped",
        SHAPES,
        config="max_batch_size: 2",
        inputs='name: "IN" data_type: TYPE_FP32 dims: [1] reshape { shape: [] }',
        outputs=shape,
    )
    write_model(
        repository,
        "keeper",
        KEEPER,
        inputs='name: "IN" data_type: TYPE_INT64 dims: [-1]',
        outputs=shape,
    )
    write_model(repository, "editor", EDITOR)
    with running_server(repository) as server:
        yield server


@pytest.fixture
def client(server):
    client = triton.InferenceServerClient(server.http_url, network_timeout=30)
    yield client
    client.close()


def tensor(name, array, datatype=None, binary=True):
    given = triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def sample(datatype, size):
    random = np.random.default_rng(size)
    if datatype == "BYTES":
        strings = [random.bytes(n % 9) for n in range(size)]
        array = np.empty(size, object)
        array[:] = strings
        return array
    dtype = np.dtype(NUMPY[datatype])
    if dtype.kind == "b":
        return random.integers(0, 2, size).astype(bool)
    if dtype.kind in "iu":
        edges = np.iinfo(dtype)
        return random.integers(edges.min, edges.max, size, dtype, endpoint=True)
    if datatype == "BF16":
        return random.standard_normal(size).astype(ml_dtypes.bfloat16)
    array = random.standard_normal(size).astype(dtype)
    return np.concatenate([array, np.array([np.nan, np.inf, -np.inf, -0.0], dtype)])[-size or 0 :]


@pytest.mark.parametrize("size", [0, 1, 7, 5_000])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_as_binary_data(client, datatype, size):
    array = sample(datatype, size) if size else np.empty(0, NUMPY[datatype])
    result = client.infer("every", [tensor(f"IN_{datatype}", array, datatype)])
    got = result.as_numpy(f"OUT_{datatype}")
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def json_values(datatype, size):
    array = sample(datatype, size)
    if datatype == "BYTES":
        return [f"text {n} \u00e9\n\\" for n in range(size)]
    return array.tolist()


@pytest.mark.parametrize("size", [0, 1, 100])
@pytest.mark.parametrize("datatype", IN_JSON)
def test_every_datatype_as_json(server, datatype, size):
    values = json_values(datatype, size) if size else []
    given = {"name": f"IN_{datatype}", "datatype": datatype, "shape": [size], "data": values}
    status, _, body = server.request(
        "POST", "/v2/models/every/infer", json.dumps({"inputs": [given]})
    )
    assert status == 200, body
    (output,) = json.loads(body)["outputs"]
    assert output["name"] == f"OUT_{datatype}"
    assert (output["datatype"], output["shape"]) == (datatype, [size])
    if datatype.startswith("FP"):
        np.testing.assert_array_equal(
            np.array(output["data"], NUMPY[datatype]), np.array(values, NUMPY[datatype])
        )
    else:
        assert output["data"] == values


def test_all_datatypes_in_one_request(client):
    arrays = {name: sample(name, 3) for name in DATATYPES}
    # Odd sizes put most of them at odd places.
    inputs = [tensor(f"IN_{name}", array, name) for name, array in arrays.items()]
    result = client.infer("every", inputs)
    for name, array in arrays.items():
        np.testing.assert_array_equal(result.as_numpy(f"OUT_{name}"), array)


@pytest.mark.parametrize("binary_first", [True, False])
def test_json_and_binary_inputs_in_one_request(client, binary_first):
    a, b = sample("FP32", 5), sample("BYTES", 4)
    b[:] = [b"one", b"", b"three", b"4"]
    inputs = [
        tensor("IN_FP32", np.nan_to_num(a), binary=binary_first),
        tensor("IN_BYTES", b, binary=not binary_first),
        tensor("IN_INT64", np.arange(3)),
        tensor("IN_UINT8", np.arange(3, dtype=np.uint8), binary=binary_first),
    ]
    outputs = [
        triton.InferRequestedOutput("OUT_FP32", binary_data=True),
        triton.InferRequestedOutput("OUT_BYTES", binary_data=False),
        triton.InferRequestedOutput("OUT_INT64", binary_data=False),
        triton.InferRequestedOutput("OUT_UINT8", binary_data=True),
    ]
    result = client.infer("every", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUT_FP32"), np.nan_to_num(a))
    assert [
        bytes(v) if isinstance(v, bytes) else v.encode() for v in result.as_numpy("OUT_BYTES")
    ] == list(b)
    np.testing.assert_array_equal(result.as_numpy("OUT_INT64"), [0, 1, 2])
    np.testing.assert_array_equal(result.as_numpy("OUT_UINT8"), [0, 1, 2])


def test_only_requested_outputs_come(client):
    a = np.array([[1, 2]], np.float32)
    inputs = [tensor("A", a), tensor("B", a)]
    result = client.infer("two", inputs, outputs=[triton.InferRequestedOutput("DIFFERENCE")])
    assert result.as_numpy("SUM") is None
    np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a - a)


def test_an_optional_input_may_be_left_out(client):
    a = np.array([[1, 2]], np.float32)
    np.testing.assert_array_equal(client.infer("two", [tensor("A", a)]).as_numpy("SUM"), a + 10)
    with pytest.raises(InferenceServerException, match="missing required input"):
        client.infer("two", [])


@pytest.mark.parametrize("batch", [1, 4])
def test_batches_up_to_the_limit(client, batch):
    a = np.random.default_rng(0).random((batch, 2), np.float32)
    result = client.infer("two", [tensor("A", a), tensor("B", 2 * a)])
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + 2 * a)
    assert result.get_output("SUM")["shape"] == [batch, 2]


def test_batches_beyond_the_limit_are_refused(client):
    a = np.zeros((5, 2), np.float32)
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4 for 'two'"):
        client.infer("two", [tensor("A", a), tensor("B", a)])


def test_a_reshaped_input_has_the_models_shape(client):
    result = client.infer("reshaped", [tensor("IN", np.zeros((2, 1), np.float32))])
    assert result.as_numpy("OUT").tolist() == [2]


def test_identifiers_and_parameters_go_both_ways(client):
    given = {"word": "\u00e9", "number": 1 << 40, "yes": True, "real": 0.5}
    result = client.infer(
        "tell",
        [tensor("IN", np.zeros(3, np.float32))],
        request_id="an id \u00e9",
        parameters=given,
        sequence_id=7,
        sequence_start=True,
        timeout=5_000_000,
        outputs=[triton.InferRequestedOutput("OUT")],
    )
    told = json.loads(result.as_numpy("OUT")[0])
    assert told["id"] == "an id \u00e9"
    assert told["parameters"] == given
    assert (told["correlation_id"], told["flags"] & 1, told["timeout"]) == (7, 1, 5_000_000)
    assert told["outputs"] == ["OUT"]
    assert told["shape"] == [[3]]
    response = result.get_response()
    assert response["id"] == "an id \u00e9"
    assert response["parameters"]["text"] == "caf\u00e9"
    # Whatever a model may set makes JSON that clients can read.
    assert response["parameters"]["lone"] == "?"
    assert response["parameters"]["huge"] == 10**30
    assert response["parameters"]["number"] == -5
    assert response["parameters"]["yes"] is True


def test_requests_without_an_identifier_have_none_in_the_answer(client):
    result = client.infer("editor", [tensor("IN", np.ones(3, np.float32))])
    assert "id" not in result.get_response()
    assert "parameters" not in result.get_response()


@pytest.mark.parametrize("size", [1 << 10, 1 << 15])
def test_inputs_that_a_model_keeps_stay_whole(server, size):
    with connected(server.http_url) as sock:
        for number in range(40):
            field, body = binary_request(
                [("IN", "INT64", [size], np.full(size, number, np.int64).tobytes())]
            )
            sock.sendall(inference("keeper", body, field))
            status, fields, answer = read_answer(sock)
            assert status == 200
            kept, whole = np.frombuffer(
                answer[int(fields["Inference-Header-Content-Length"]) :], np.int64
            )
            assert kept == whole


def test_an_input_may_be_edited_in_place(client):
    for size in (4, 100_000):
        array = np.arange(1, size + 1, dtype=np.float32)
        expected = 2 * array
        expected[0] = -1
        for _ in range(3):
            got = client.infer("editor", [tensor("IN", array)]).as_numpy("OUT")
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests_and_answers(client, coding):
    array = np.arange(10_000, dtype=np.float32)
    result = client.infer(
        "every",
        [tensor("IN_FP32", array)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    np.testing.assert_array_equal(result.as_numpy("OUT_FP32"), array)


def test_many_clients_at_once_get_their_own_answers(server):
    with triton.InferenceServerClient(server.http_url, concurrency=8) as client:
        pending = []
        for number in range(64):
            array = np.full(1 + 997 * (number % 7), number, np.float32)
            pending.append((array, client.async_infer("every", [tensor("IN_FP32", array)])))
        for array, answer in pending:
            np.testing.assert_array_equal(answer.get_result().as_numpy("OUT_FP32"), array)
