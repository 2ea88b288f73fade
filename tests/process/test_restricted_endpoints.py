"""Groups of endpoints that only who knows a header's value may use, over HTTP and gRPC."""

import http.client
import json
import signal
import socket

import grpc
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
from tritonclient.grpc import service_pb2 as messages, service_pb2_grpc

from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, send_request, wait_until, write_model

SOURCE = answering("return respond(OUT=value)")
CALLER = answering("""
pb_utils.unload_model("spare")
pb_utils.load_model("spare")
call = pb_utils.InferenceRequest(
    model_name="m", requested_output_names=["OUT"], inputs=request.inputs()
)
return respond(OUT=call.exec().output_tensors()[0].as_numpy())
""")
STREAM = sending("send(OUT=value)")
GROUPS = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository",
    "statistics", "trace", "logging",
)  # fmt: skip
OF_STATUS = [group for group in GROUPS if group not in ("inference", "trace", "logging")]
PAGE = "https://app.example"
SECRET = "p4ss:w=rd, with a blank"
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
INFER, GENERATE = json.dumps({"inputs": [TENSOR]}), '{"IN": 1.0}'
HTTP = [
    ("health", "GET", "/v2/health/live", None),
    ("health", "GET", "/v2/health/ready", None),
    ("health", "GET", "/v2/models/m/ready", None),
    ("metadata", "GET", "/v2", None),
    *(("metadata", "GET", path, None) for path in ("/", "/docs", "/v2/openapi.json")),
    ("metadata", "GET", "/v2/models/m", None),
    ("metadata", "GET", "/v2/models/m/versions/1", None),
    ("model-config", "GET", "/v2/models/m/config", None),
    ("statistics", "GET", "/v2/models/stats", None),
    ("statistics", "GET", "/v2/models/m/stats", None),
    ("inference", "POST", "/v2/models/m/infer", INFER),
    ("inference", "POST", "/v2/models/m/versions/1/infer", INFER),
    ("inference", "POST", "/v2/models/m/generate", GENERATE),
    ("inference", "POST", "/v2/models/stream/generate_stream", GENERATE),
    ("model-repository", "POST", "/v2/repository/index", None),
    ("model-repository", "POST", "/v2/repository/models/spare/load", None),
    ("model-repository", "POST", "/v2/repository/models/spare/unload", None),
    ("trace", "GET", "/v2/trace/setting", None),
    ("trace", "POST", "/v2/models/m/trace/setting", "{}"),
    ("logging", "GET", "/v2/logging", None),
    ("logging", "POST", "/v2/logging", "{}"),
    ("shared-memory", "GET", "/v2/systemsharedmemory/status", None),
    ("shared-memory", "POST", "/v2/systemsharedmemory/unregister", None),
    ("shared-memory", "GET", "/v2/cudasharedmemory/region/a/status", None),
]
CALL = messages.ModelInferRequest(model_name="m")
CALL.inputs.add(name="IN", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
METHODS = """
health ServerLive ServerReady ModelReady
metadata ServerMetadata ModelMetadata
inference ModelInfer
model-config ModelConfig
statistics ModelStatistics
model-repository RepositoryIndex RepositoryModelLoad RepositoryModelUnload
trace TraceSetting
logging LogSettings
shared-memory SystemSharedMemoryStatus SystemSharedMemoryUnregister CudaSharedMemoryStatus
"""


def methods():
    """Pairs of a group and one of its methods."""
    for group, *names in map(str.split, METHODS.strip().splitlines()):
        yield from ((group, name) for name in names)


def message_of(name):
    """Return the request of a method."""
    if name == "ModelInfer":
        return CALL
    model = {"model_name": "spare"} if name.startswith("RepositoryModel") else {"name": "m"}
    return getattr(messages, f"{name}Request")(**(model if "Model" in name else {}))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The file that has the key of the group trace, over HTTP and gRPC."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(SECRET)
    return file


@pytest.fixture(scope="module")
def server(repository, keys):
    for name, source in (("m", SOURCE), ("spare", SOURCE), ("caller", CALLER)):
        write_model(repository, name, source)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "stream", STREAM, config=decoupled)
    write_ensemble(repository, "chain", "m IN=IN > OUT=OUT", inputs="IN", outputs="OUT")
    values = {**dict.fromkeys((*GROUPS, "metrics"), SECRET), "trace": f"@{keys}"}
    flags = [f"--http-restricted-api={group}:K-{group}={v}" for group, v in values.items()]
    flags += [f"--grpc-restricted-protocol={group}:K-{group}={values[group]}" for group in GROUPS]
    flags += [f"--http-allowed-origins={PAGE}"]
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    # Readiness is restricted, too.
    with running_server(repository, *flags, *explicit, ready=False) as running:
        with over_grpc.InferenceServerClient(running.grpc_url) as client:
            header = key("health", grpc=True)
            wait_until(lambda: client.is_server_ready(headers=header), "readiness", running)
        yield running
        assert SECRET not in running.log()


def key(group, *, grpc=False, value=SECRET):
    return {f"triton-grpc-protocol-k-{group}" if grpc else f"k-{group}": value}


def refusal(group):
    return {"error": f"This API is restricted, expecting header 'K-{group}'"}


@pytest.mark.parametrize(("group", "method", "path", "body"), HTTP)
def test_over_http(server, group, method, path, body):
    others = {
        name: value for other in GROUPS if other != group for name, value in key(other).items()
    }
    wrong = [key(group, value=value) for value in ("", SECRET[:-1], SECRET + "x", SECRET.upper())]
    for headers in (others, *wrong):
        status, _, said = server.request(method, path, body, headers)
        assert (status, json.loads(said)) == (403, refusal(group))
    status, _, said = server.request(method, path, body, key(group))
    assert status == 200 or "'a'" in said.decode(), said


@pytest.mark.parametrize(("group", "method", "path", "body"), HTTP)
def test_web_pages_over_http(server, group, method, path, body):
    text = {"Content-Type": "text/plain"}
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        status, _, said = server.request(method, path, body, {**key(group), **text, **headers})
        assert status == 403
        assert b"--http-allowed-origins=http://evil.example" in said
    own = {"Origin": f"http://{server.http_url}", "Sec-Fetch-Site": "same-origin"}
    for headers in ({"Origin": PAGE}, own):
        control = method == "POST" and group != "inference"
        status, _, said = server.request(method, path, body, {**key(group), **text, **headers})
        assert (status == 415) == control, said
        json_type = {"Content-Type": "application/json; charset=utf-8"}
        status, _, said = server.request(method, path, body, {**key(group), **json_type, **headers})
        assert status == 200 or "'a'" in said.decode(), said


def test_absent_resources_are_restricted_before_they_are_looked_up(server):
    for method, path, group in (
        ("GET", "/v2/models/none", "metadata"),
        ("POST", "/v2/models/none/infer", "inference"),
        ("GET", "/v2/models/m/infer", "inference"),
        ("POST", "/v2/health/live", "health"),
        ("GET", "/v2/models/m?x=1", "metadata"),
    ):
        assert json.loads(server.request(method, path)[2]) == refusal(group)
    assert server.request("GET", "/v2/health/live", headers=key("health"))[0] == 200
    assert server.request("POST", "/v2/health/live", headers=key("health"))[0] == 405
    assert server.request("GET", "/v2/none")[0] == 404


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_inference_on_one_connection_again_and_again(server, size):
    """Such requests are what compiled code takes alone, once it knows their form."""
    data = np.ones(size, np.float32).tobytes()
    entry = {"name": "IN", "datatype": "FP32", "shape": [size]}
    head = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": len(data)}}]})
    length = {"Inference-Header-Content-Length": str(len(head))}
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    try:
        for known in (False, True, True, False, True, False, False, True):
            value = SECRET if known else "x" * len(SECRET)
            headers = {**length, **key("inference", value=value)}
            connection.request("POST", "/v2/models/m/infer", head.encode() + data, headers)
            response = connection.getresponse()
            assert response.status == (200 if known else 403)
            assert response.read()
    finally:
        connection.close()


def test_metrics_and_the_status(server):
    def fetch(url, path, *groups):
        headers = {name: value for group in groups for name, value in key(group).items()}
        return send_request(url, "GET", path, None, headers)

    status = "/v2/gpubridge/status"
    for path in ("/metrics", status, "/", "/v2/models/m"):
        code, _, said = fetch(server.metrics_url, path)
        assert (code, json.loads(said)) == (403, refusal("metrics"))
    assert b"nv_inference" in fetch(server.metrics_url, "/metrics", "metrics")[2]
    assert fetch(server.metrics_url, "/", "metrics")[0] == 200
    told = ["metrics", *OF_STATUS]
    for url in (server.metrics_url, server.http_url):
        assert fetch(url, status, *told)[0] == 200
        for missing in told:
            assert fetch(url, status, *(group for group in told if group != missing))[0] == 403


def test_web_pages_on_the_metrics_port(server):
    for path in ("/metrics", "/v2/gpubridge/status", "/", "/v2/models/m"):
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            both = {**headers, **key("metrics")}
            assert send_request(server.metrics_url, "GET", path, None, both)[0] == 403
        keys = [key(group) for group in ("metrics", *OF_STATUS)]
        headers = {**dict(pair for each in keys for pair in each.items()), "Origin": PAGE}
        assert send_request(server.metrics_url, "GET", path, None, headers)[0] == 200


def test_openais_api_is_inference_and_metadata(server):
    body = json.dumps({"model": "none", "messages": [{"role": "user", "content": "a"}]})
    for group, *asked in (
        ("inference", "POST", "/v1/chat/completions", body),
        ("metadata", "GET", "/v1/models", None),
    ):
        for other in ("inference", "metadata"):
            status, _, _ = server.request(*asked, key(other))
            assert (status == 401) == (other != group)
        for value in (SECRET, "wrong"):
            status, _, _ = server.request(*asked, {"Authorization": f"bearer {value}"})
            assert (status == 401) == (value != SECRET)


def test_a_header_that_is_given_twice_is_refused(server):
    twice = [("K-inference", SECRET)] * 2
    body = INFER.encode()
    with socket.create_connection(server.http_url.split(":")) as sock:
        for fields, status in ((twice, 403), (twice[:1], 200), (twice, 403)):
            lines = [f"{name}: {value}" for name, value in fields]
            head = ["POST /v2/models/m/infer HTTP/1.1", *lines, f"Content-Length: {len(body)}"]
            sock.sendall("\r\n".join([*head, "", ""]).encode() + body)
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert response.status == status
            response.read()
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        for _ in range(2):
            assert outcome(call, CALL, metadata=metadata("inference") * 2) == closed("inference")
            assert not isinstance(outcome(call, CALL, metadata=metadata("inference")), tuple)


def outcome(call, *arguments, **options):
    try:
        return call(*arguments, timeout=150, **options)
    except grpc.RpcError as error:
        return error.code(), error.details()


def closed(group):
    return (
        grpc.StatusCode.UNAVAILABLE,
        f"This protocol is restricted, expecting header 'triton-grpc-protocol-K-{group}'",
    )


def metadata(group, **options):
    return tuple(key(group, grpc=True, **options).items())


@pytest.mark.parametrize(("group", "name"), [*methods()])
def test_over_grpc(server, group, name):
    message = message_of(name)
    with grpc.insecure_channel(server.grpc_url) as channel:
        method = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
        others = tuple(pair for other in GROUPS if other != group for pair in metadata(other))
        for _ in range(2):
            assert outcome(method, message) == closed(group)
            for given in (others, metadata(group, value=""), tuple(key(group).items())):
                assert outcome(method, message, metadata=given) == closed(group)
            assert not isinstance(outcome(method, message, metadata=metadata(group)), tuple)


def test_grpc_health_service(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")

        def watched(*arguments, **options):
            return next(watch(*arguments, **options))

        for call in (check, watched):
            assert outcome(call, b"") == closed("health")
            assert outcome(call, b"", metadata=metadata("health")) == b"\x08\x01"


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_grpc_inference_again_and_again(server, size, compression):
    tensor = over_grpc.InferInput("IN", [size], "FP32")
    tensor.set_data_from_numpy(np.ones(size, np.float32))
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        for known in (False, True, True, False, False, True):
            value = SECRET if known else "x" * len(SECRET)
            headers = key("inference", grpc=True, value=value)
            options = {"headers": headers, "compression_algorithm": compression}
            if known:
                assert client.infer("m", [tensor], **options).as_numpy("OUT").size == size
            else:
                with pytest.raises(over_grpc.InferenceServerException) as caught:
                    client.infer("m", [tensor], **options)
                assert caught.value.message() == closed("inference")[1]


@pytest.mark.parametrize("model", ["m", "stream"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_grpc_streams(server, model, count):
    calls = [messages.ModelInferRequest(model_name=model, inputs=CALL.inputs)] * count
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def answers(**options):
            return [
                len(one.infer_response.outputs)
                for one in stub.ModelStreamInfer(iter(calls), **options)
            ]

        assert outcome(answers) == closed("inference")
        assert outcome(answers, metadata=metadata("inference")) == [1] * count


@pytest.mark.parametrize("model", ["caller", "chain"])
def test_models_call_and_load_each_other_as_ever(server, model):
    path = f"/v2/models/{model}/infer"
    status, _, body = server.request("POST", path, INFER, key("inference"))
    assert status == 200, body


def test_a_running_server_takes_the_keys_that_a_file_has_now(server, keys):
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).TraceSetting

        def admitted(value):
            http = server.request("GET", "/v2/trace/setting", None, key("trace", value=value))
            given = metadata("trace", value=value)
            answer = outcome(call, messages.TraceSettingRequest(), metadata=given)
            return http[0] == 200, not isinstance(answer, tuple)

        for content, old, new in (
            (f"{SECRET}\nnext", True, True),
            ("next", False, True),
            ("", False, True),
            (SECRET, True, False),
        ):
            keys.write_text(content)
            before = server.log().count("SIGHUP")
            server.process.send_signal(signal.SIGHUP)
            if not content:
                wait_until(lambda n=before: server.log().count("SIGHUP") > n, "an error", server)
            expected = [(old, old), (new, new)]
            wait_until(lambda e=expected: [*map(admitted, (SECRET, "next"))] == e, "keys", server)


def test_the_line_for_each_model_names_the_header(server):
    assert "each model once, with -H 'K-inference: ...':" in server.log()
