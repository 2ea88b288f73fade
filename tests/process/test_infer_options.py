"""Parts of a request besides its inputs: outputs, batches, shapes, an identifier, parameters."""

import json

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

TWO = answering(
    """
b = pb_utils.get_input_tensor_by_name(request, "B")
b = np.full_like(value, 10) if b is None else b.as_numpy()
return respond(SUM=value + b, DIFFERENCE=value - b)
"""
)

TELL = answering(
    """
told = {
    "id": request.request_id(),
    "parameters": json.loads(request.parameters()),
    "correlation_id": request.correlation_id(),
    "flags": request.flags(),
    "timeout": request.timeout(),
    "outputs": sorted(request.requested_output_names()),
    "shape": [t.shape() for t in request.inputs()],
}
parameters = {"text": "caf\\u00e9", "lone": "\\ud800", "number": -5, "huge": 10**30, "yes": True}
return respond(parameters, OUT=np.array([json.dumps(told).encode()], dtype=object))
"""
)

SHAPES = answering("return respond(OUT=np.array(request.inputs()[0].shape(), dtype=np.int64))")


@pytest.fixture(scope="module")
def server(repository):
    write_model(
        repository,
        "two",
        TWO,
        config="max_batch_size: 4",
        tensors="A FP32 [2]; B FP32 [2] optional: true > SUM FP32 [2]; DIFFERENCE FP32 [2]",
    )
    write_model(repository, "tell", TELL, tensors="> OUT STRING [1]")
    shapes = "IN FP32 [1] reshape { shape: [] } > OUT INT64 [-1]"
    write_model(repository, "reshaped", SHAPES, config="max_batch_size: 2", tensors=shapes)
    with running_server(repository) as server:
        yield server


@pytest.fixture
def client(server):
    client = triton.InferenceServerClient(server.http_url, network_timeout=150)
    yield client
    client.close()


def tensor(name, array):
    return triton.InferInput(name, array.shape, "FP32").set_data_from_numpy(array)


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
    result = client.infer("reshaped", [tensor("IN", np.ones((1, 1), np.float32))])
    assert "id" not in result.get_response()
    assert "parameters" not in result.get_response()
