"""Counts, and lines of logs, of requests that no model executes."""

import http.client
import json
import re
from contextlib import nullcontext

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.process.flag_sets import METRICS
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

KEY = {"triton-grpc-protocol-my_key": "v"}
FITS = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = tmp_path_factory.mktemp("seen") / "models"
    write_model(models, "m", answering("return respond(OUT=value)"))
    write_model(models, "stream", answering("return respond(OUT=value)"), config=DECOUPLED)
    with running_server(models) as running:
        yield running


def increase(server, work):
    before = server.metrics()
    work()
    after = server.metrics()
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if value > before.get(name, 0)
    }


def refused(model):
    return f'nv_inference_request_failure{{model="{model}",reason="OTHER",version="1"}}'


def answers(kind, endpoint, code):
    return f'gpubridge_{kind}_requests_total{{code="{code}",endpoint="{endpoint}"}}'


BODIES = {
    "no JSON": b"{",
    "no inputs": {"inputs": []},
    "unknown input": {"inputs": [{**FITS, "name": "X"}]},
    "wrong shape": {"inputs": [{**FITS, "shape": [2]}]},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_fifty_refused_requests_are_fifty_at_their_endpoint_and_model(server, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/v2/models/m/infer"
    statuses = []

    def send():
        statuses.extend(server.request("POST", path, body)[0] for _ in range(50))

    seen = increase(server, send)
    assert len({*statuses}) == 1
    assert statuses[0] >= 400
    assert (seen[answers("http", "infer", statuses[0])], seen[refused("m")]) == (50, 50)


@pytest.mark.parametrize(
    ("method", "path", "endpoint", "status", "model"),
    [
        ("POST", "/v2/models/stream/infer", "infer", 501, "stream"),
        ("POST", "/v2/models/m/generate", "generate", 400, "m"),
        ("POST", "/v2/models/m/generate_stream", "generate_stream", 400, "m"),
        ("POST", "/v2/models/none/infer", "infer", 404, None),
        ("GET", "/v2/models/m/infer", "infer", 405, None),
        ("GET", "/v2/health/live", "health", 200, None),
        ("GET", "/no/such/path/of/a/client", "other", 404, None),
    ],
)
def test_each_endpoint_counts_its_answers(server, method, path, endpoint, status, model):
    seen = increase(server, lambda: server.request(method, path, b'{"IN": {}}'))
    assert seen[answers("http", endpoint, status)] == 1
    assert {name for name in seen if name.startswith("nv_inference_request_failure")} == (
        {refused(model)} if model else set()
    )


def test_a_request_that_is_refused_by_its_head_is_counted_where_it_was_sent(server):
    def send():
        connection = http.client.HTTPConnection(*server.http_url.split(":"))
        connection.putrequest("POST", "/v2/models/m/infer")
        connection.putheader("Content-Length", str(1 << 60))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()

    assert increase(server, send)[answers("http", "infer", 413)] == 1


def tensor(name, *shape):
    made = triton.InferInput(name, shape, "BYTES")
    made.set_data_from_numpy(np.full(shape, b"x", object))
    return made


@pytest.mark.parametrize("streamed", [False, True])
def test_refused_calls_are_counted_by_method_and_status_and_at_the_model(server, streamed):
    results = []

    def send():
        with triton.InferenceServerClient(server.grpc_url) as client:
            if streamed:
                client.start_stream(lambda result, error: results.append(error))
                for _ in range(5):
                    client.async_stream_infer("m", [tensor("X", 1)])
                client.stop_stream()
                return
            for _ in range(5):
                with pytest.raises(InferenceServerException):
                    client.infer("m", [tensor("X", 1)])

    seen = increase(server, send)
    assert seen[refused("m")] == 5
    if streamed:
        assert len(results) == 5
        assert seen[answers("grpc", "ModelStreamInfer", "OK")] == 1
    else:
        assert seen[answers("grpc", "ModelInfer", "INVALID_ARGUMENT")] == 5


FAILING = """
if len(value) > 1:
    os._exit(3)
if value[0] > 1:
    raise ValueError("no luck")
"""
LINE = re.compile(
    r'access\] request id="(.*?)" model="(\w*)" version="\d*" client="127.0.0.1:\d+" '
    r'protocol="(\w+)" endpoint="(\w+)" status=(\d+) bytes_in=(\d+) bytes_out=(\d+) ms='
)
FAILED = re.compile(
    r'request failed: id="(.*?)" model="(\w*)" version="1" client="127.0.0.1:\d+" protocol="(\w+)": (.*)'
)


def floats(*values, name="IN"):
    made = triton.InferInput(name, [len(values)], "FP32")
    made.set_data_from_numpy(np.array(values, np.float32))
    return [made]


def ask_both_protocols(server):
    for path, body in (
        ("m/infer", {"id": "http", "inputs": [FITS]}),
        ("m/generate", {"id": "gen", "IN": 1.0}),
        ("m/infer", {"id": "bad", "inputs": []}),
        ("m/infer", {"inputs": [{**FITS, "data": [2]}]}),
        ("m/infer", {"id": "died", "inputs": [{**FITS, "shape": [2], "data": [2, 2]}]}),
        ("m/generate", {"id": "gen 2", "IN": 2.0}),
        ("d/generate_stream", {"id": "events", "IN": 2.0}),
    ):
        server.request("POST", "/v2/models/" + path, json.dumps(body).encode())
    with triton.InferenceServerClient(server.grpc_url) as client:
        for identifier, given in (
            ("grpc", floats(1)),
            ("grpc X", floats(1, name="X")),
            ("grpc 2", floats(2)),
        ):
            with nullcontext() if identifier == "grpc" else pytest.raises(InferenceServerException):
                client.infer("m", given, request_id=identifier, headers=KEY)
        client.start_stream(lambda result, error: None, headers=KEY)
        for model in "md":
            for value in (1, 2):
                client.async_stream_infer(model, floats(value), request_id=f"{model} {value}")
        client.stop_stream()


def test_the_log_tells_whose_each_request_was_and_what_failed(tmp_path):
    write_model(tmp_path / "models", "m", answering(FAILING + "return respond(OUT=value)"))
    write_model(tmp_path / "models", "d", sending(FAILING + "send(OUT=value)"), config=DECOUPLED)
    with running_server(tmp_path / "models", *METRICS) as server:
        ask_both_protocols(server)
        wanted = {
            ("http", "m", "http", "infer", "200"),
            ("gen", "m", "http", "generate", "200"),
            ("#", "m", "http", "infer", "400"),
            ("grpc", "m", "grpc", "ModelInfer", "0"),
            ("grpc X", "m", "grpc", "ModelInfer", "3"),
            ("m 1", "m", "grpc", "ModelStreamInfer", "0"),
            ("m 2", "m", "grpc", "ModelStreamInfer", "13"),
            ("d 1", "d", "grpc", "ModelStreamInfer", "0"),
            ("d 2", "d", "grpc", "ModelStreamInfer", "13"),
        }

        def lines():
            return LINE.findall(server.log())

        def all_there():
            return wanted <= {(re.sub(r"#\d+", "#", line[0]), *line[1:5]) for line in lines()}

        wait_until(all_there, "the lines", server)
        streams = [line for line in lines() if line[3] == "ModelStreamInfer"]
        assert all(int(nbytes) > 0 for line in streams for nbytes in line[5:]), streams
        assert len(streams) == 4
        failed = {identifier: rest for identifier, *rest in FAILED.findall(server.log())}
        (nameless,) = [identifier for identifier in failed if identifier.startswith("#")]
        assert (nameless, "m", "http", "infer", "500") in [line[:5] for line in lines()]
        text = "Failed to process the request(s) for model '{}_0', message: ValueError: no luck"
        for identifier, model, protocol in (
            (nameless, "m", "http"),
            ("gen 2", "m", "http"),
            ("events", "d", "http"),
            ("grpc 2", "m", "grpc"),
            ("m 2", "m", "grpc"),
            ("d 2", "d", "grpc"),
        ):
            assert failed.pop(identifier) == [model, protocol, text.format(model)]
        ((identifier, (model, _, told)),) = failed.items()
        assert (identifier, model) == ("died", "m")
        assert told.startswith("Stub process 'm_0' is not healthy.")
