"""Headers of requests that reach models as parameters: over every way to ask, as Triton's patterns say."""

import http.client
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as over_grpc

from tests.process.flag_sets import METRICS
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, write_model

SAID = "OUT=np.array([request.parameters()], np.object_)"
OUT = "> OUT STRING [1]"
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
HEADERS = {"X-User": "Ann", "my_h": "Z", "Other": "1", "x": "too short"}
KEY = {"triton-grpc-protocol-my_key": "v"}


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "m", answering(f"return respond({SAID})"), tensors=OUT)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "stream", sending(f"send({SAID})"), tensors=OUT, config=decoupled)
    with running_server(repository, *METRICS) as running:
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


def seen_over_grpc(answer):
    """Return the parameters that the model sees of a request, without the client's name."""
    seen = json.loads(answer.as_numpy("OUT")[0])
    assert seen.pop("user-agent").startswith("grpc-python")
    return seen


@pytest.mark.parametrize(("size", "compression"), [(1, None), (1 << 20, "gzip"), (1 << 20, None)])
def test_over_grpc(server, size, compression):
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        for user in ("Ann", "Bob"):
            answer = client.infer(
                "m",
                [tensor(size)],
                headers={**KEY, "x-user": user, "x-bin": b"\x01\xff", "other": "1"},
                parameters={"b": 2},
                compression_algorithm=compression,
                client_timeout=100,
            )
            seen = seen_over_grpc(answer)
            assert seen.pop("x-bin").rstrip("=") == "Af8"
            # Neither the key nor what the protocol has.
            assert seen == {"b": 2, "x-user": user}
        assert seen_over_grpc(client.infer("m", [tensor(size)], headers=KEY)) == {}


@pytest.mark.parametrize("model", ["m", "stream"])
def test_over_a_stream(server, model):
    answers = queue.Queue()
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers={**KEY, "x-user": "Ann"}
        )
        for _ in range(2):
            client.async_stream_infer(model, [tensor()])
            result, error = answers.get(timeout=150)
            assert error is None
            assert seen_over_grpc(result) == {"x-user": "Ann"}


def test_secrets_of_restricted_endpoints_reach_no_model(server):
    assert infer(server, {"x-sEcRet": "w", "X-SECRET-2": "3"}) == {"X-SECRET-2": "3"}
