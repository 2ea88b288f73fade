"""Inference from a client to a model and back: every datatype in every form."""

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

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


def declare(prefix, dims="[-1]"):
    return "; ".join(
        f"{prefix}_{name} {'STRING' if name == 'BYTES' else name} {dims}"
        + (" optional: true" if prefix == "IN" else "")
        for name in DATATYPES
    )


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "every", EVERY, tensors=f"{declare('IN')} > {declare('OUT')}")
    with running_server(repository) as server:
        yield server


@pytest.fixture
def client(server):
    client = triton.InferenceServerClient(server.http_url, network_timeout=150)
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


def test_many_clients_at_once_get_their_own_answers(server):
    with triton.InferenceServerClient(server.http_url, concurrency=8) as client:
        pending = []
        for number in range(64):
            array = np.full(1 + 997 * (number % 7), number, np.float32)
            pending.append((array, client.async_infer("every", [tensor("IN_FP32", array)])))
        for array, answer in pending:
            np.testing.assert_array_equal(answer.get_result().as_numpy("OUT_FP32"), array)
