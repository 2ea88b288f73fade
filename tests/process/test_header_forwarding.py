"""Headers of requests that reach models as parameters: over every way to ask, as Triton's patterns say."""

from __future__ import annotations

import http.client
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as over_grpc

from tests.process.server import running_server, write_model

SOURCE = """
import json
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    def answer(self, request):
        said = np.array([request.parameters()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)])

    def execute(self, requests):
        if not self.decoupled:
            return [self.answer(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
OUT = 'name: "OUT" data_type: TYPE_STRING dims: [1]'
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
HEADERS = {"X-User": "Ann", "my_h": "Z", "Other": "1", "x": "too short"}
PATTERNS = ("--http-header-forward-pattern=(x-|MY_).*", "--grpc-header-forward-pattern=(X-|my_).*")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "m", SOURCE, outputs=OUT)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "stream", SOURCE, outputs=OUT, config=decoupled)
    with running_server(repository, *PATTERNS) as running:
        yield running


def infer(server, headers, **parameters):
    """Return the parameters that the model sees of a request over HTTP."""
    document = json.dumps({"inputs": [TENSOR], "parameters": parameters})
    status, _, body = server.request("POST", "/v2/models/m/infer", document, headers)
    assert status == 200, body
    return json.loads(json.loads(body)["outputs"][0]["data"][0])


def test_over_http(server):
    # Again and again: what is known of a request's form knows nothing of its headers.
    for user in ("Ann", "Bob", "Cec"):
        assert infer(server, {**HEADERS, "X-User": user}) == {"X-User": user, "my_h": "Z"}
        assert infer(server, {"Other": "1"}) == {}


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_over_http_with_bytes_again_and_again(server, size):
    """Such requests are what compiled code takes alone, once it knows their form."""
    data = np.ones(size, np.float32).tobytes()
    entry = {"name": "IN", "datatype": "FP32", "shape": [size]}
    head = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": len(data)}}]})
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    try:
        for user in ("", "Ann", "", "Bob", "Cec"):
            headers = {"Inference-Header-Content-Length": str(len(head)), "Other": "1"}
            headers |= {"X-User": user} if user else {}
            connection.request("POST", "/v2/models/m/infer", head.encode() + data, headers)
            answer = json.loads(connection.getresponse().read())
            seen = json.loads(answer["outputs"][0]["data"][0])
            assert seen == ({"X-User": user} if user else {})
    finally:
        connection.close()


def test_they_stand_beside_parameters_and_win_over_them(server):
    mine = {"a": 1, "x-user": "mine", "big": 2**60}
    assert infer(server, {"x-user": "Ann"}, **mine) == {"a": 1, "x-user": "Ann", "big": 2**60}


def test_equal_names_and_letters_of_any_kind(server):
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    try:
        body = json.dumps({"inputs": [TENSOR]})
        connection.putrequest("POST", "/v2/models/m/infer")
        connection.putheader("Content-Length", str(len(body)))
        for value in (b"first", b"last", "ü".encode()):
            connection.putheader("x-user", value)
        connection.putheader("x-latin", b"\xfc")
        connection.endheaders(body.encode())
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    assert json.loads(answer["outputs"][0]["data"][0]) == {"x-user": "ü", "x-latin": "ü"}


@pytest.mark.parametrize("path", ["m/generate", "m/generate_stream", "stream/generate_stream"])
def test_over_generate(server, path):
    status, _, body = server.request("POST", f"/v2/models/{path}", '{"IN": 1.0, "b": 2}', HEADERS)
    assert status == 200, body
    answer = json.loads(body.decode().removeprefix("data: "))
    assert json.loads(answer["OUT"]) == {"b": 2, "X-User": "Ann", "my_h": "Z"}


def tensor(size=1):
    made = over_grpc.InferInput("IN", [size], "FP32")
    return made.set_data_from_numpy(np.ones(size, np.float32))


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_over_grpc(server, size, compression):
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        for user in ("Ann", "Bob"):
            answer = client.infer(
                "m",
                [tensor(size)],
                headers={"x-user": user, "other": "1"},
                parameters={"b": 2},
                compression_algorithm=compression,
            )
            assert json.loads(answer.as_numpy("OUT")[0]) == {"b": 2, "x-user": user}
        assert json.loads(client.infer("m", [tensor(size)]).as_numpy("OUT")[0]) == {}


@pytest.mark.parametrize("model", ["m", "stream"])
def test_over_a_stream(server, model):
    answers = queue.Queue()
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers={"x-user": "Ann"}
        )
        for _ in range(2):
            client.async_stream_infer(model, [tensor()])
            result, error = answers.get(timeout=150)
            assert error is None
            assert json.loads(result.as_numpy("OUT")[0]) == {"x-user": "Ann"}


def test_headers_of_the_protocol_are_no_parameters(tmp_path):
    write_model(tmp_path, "m", SOURCE, outputs=OUT)
    with (
        running_server(tmp_path, "--grpc-header-forward-pattern=.*") as server,
        over_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        answer = client.infer(
            "m", [tensor()], headers={"mine": "1", "x-bin": b"\x01\xff"}, client_timeout=100
        )
        seen = json.loads(answer.as_numpy("OUT")[0])
        assert seen.pop("user-agent").startswith("grpc-python")
        assert seen.pop("mine") == "1"
        assert seen.pop("x-bin").rstrip("=") == "Af8"
        assert not {name for name in seen if name.startswith((":", "grpc-")) or "content" in name}
        # Nothing is asked for over HTTP.
        assert infer(server, HEADERS) == {}


def test_secrets_of_restricted_endpoints_reach_no_model(tmp_path):
    write_model(tmp_path, "m", SOURCE, outputs=OUT)
    flags = [f"--{protocol}-header-forward-pattern=.*" for protocol in ("http", "grpc")]
    flags += ["--http-restricted-api=inference:X-Key=v", "--http-restricted-api=statistics:other=w"]
    flags += ["--grpc-restricted-protocol=inference:X-Key=v"]
    with (
        running_server(tmp_path, *flags) as server,
        over_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        given = {"x-kEY": "v", "OTHER": "w", "x-key-2": "3"}
        seen = infer(server, given)
        assert {name.lower() for name in seen} & {"x-key", "other", "x-key-2"} == {"x-key-2"}
        key = "triton-grpc-protocol-x-key"
        answer = client.infer("m", [tensor()], headers={key: "v", "x-key": "3"})
        assert {"x-key": "3"}.items() <= (seen := json.loads(answer.as_numpy("OUT")[0])).items()
        assert key not in seen
