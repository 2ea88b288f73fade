"""The classification extension through tritonclient, over every endpoint."""

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

CODE = answering("return respond(OUT=value, FLAG=value > 1)")
OUTPUTS = '> OUT FP32 [-1] label_filename: "labels.txt"; FLAG BOOL [-1]'
ROWS = np.array([[0.5, 3, -1], [7, 0, 2.25]], np.float32)
EXPECTED = [
    [b"3.000000:1:dog", b"0.500000:0:cat"],
    [b"7.000000:0:cat", b"2.250000:2"],
]


@pytest.fixture(scope="module")
def server(repository):
    directory = write_model(repository, "m", CODE, config="max_batch_size: 4", tensors=OUTPUTS)
    (directory / "labels.txt").write_text("cat\ndog\n")
    with running_server(repository) as running:
        yield running


def tensor(client):
    return client.InferInput("IN", list(ROWS.shape), "FP32").set_data_from_numpy(ROWS)


@pytest.mark.parametrize("binary", [True, False])
def test_over_http(server, binary):
    with over_http.InferenceServerClient(server.http_url) as client:
        output = over_http.InferRequestedOutput("OUT", binary_data=binary, class_count=2)
        answer = client.infer("m", [tensor(over_http)], outputs=[output])
    found = answer.as_numpy("OUT").tolist()
    assert [[v if binary else v.encode() for v in row] for row in found] == EXPECTED
    assert answer.get_output("FLAG") is None


def test_over_grpc_beside_an_output_that_is_asked_for_itself(server):
    outputs = [
        over_grpc.InferRequestedOutput("OUT", class_count=2),
        over_grpc.InferRequestedOutput("FLAG"),
    ]
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        for _ in range(2):
            answer = client.infer("m", [tensor(over_grpc)], outputs=outputs, request_id="mine")
            assert answer.as_numpy("OUT").tolist() == EXPECTED
            assert answer.as_numpy("FLAG").tolist() == (ROWS > 1).tolist()
            assert answer.get_response().id == "mine"


@pytest.mark.parametrize(("module", "url"), [(over_http, "http_url"), (over_grpc, "grpc_url")])
def test_values_without_an_order_are_refused_and_nothing_else_suffers(server, module, url):
    with module.InferenceServerClient(getattr(server, url)) as client:
        output = module.InferRequestedOutput("FLAG", class_count=1)
        with pytest.raises(InferenceServerException, match="unsupported type 'BOOL'"):
            client.infer("m", [tensor(module)], outputs=[output])
        answer = client.infer("m", [tensor(module)])
        assert np.array_equal(answer.as_numpy("OUT"), ROWS)
