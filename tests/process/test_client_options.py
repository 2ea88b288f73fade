"""Arguments of tritonclient's calls besides a model and its inputs, over each transport."""

import json
import queue

import numpy as np
import pytest
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.process.gates import Gate
from tests.process.model_sources import answering
from tests.process.server import running_server, write_model

grpc_client = pytest.importorskip("tritonclient.grpc")

# Answers what it was asked with, after a wait where the input says so.
SEEN = answering(
    """
if value[0]:
    import fcntl
    fcntl.flock(open(os.path.dirname(__file__) + "/gate"), fcntl.LOCK_SH)
seen = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
        json.loads(request.parameters())]
return respond(OUT=np.array([json.dumps(seen)], np.object_))
"""
)
CLIENTS = {"http": http_client, "grpc": grpc_client}


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "seen", SEEN, tensors="> OUT STRING [1]")
    with running_server(repository) as running:
        yield running


@pytest.fixture(params=CLIENTS)
def api(request, server):
    """The client library for a protocol, and a client of it."""
    module = CLIENTS[request.param]
    url = getattr(server, f"{request.param}_url")
    with module.InferenceServerClient(url) as client:
        yield module, client


def inputs(module, wait=0.0, count=1):
    tensor = module.InferInput("IN", [count], "FP32")
    tensor.set_data_from_numpy(np.full(count, wait, np.float32))
    return [tensor]


def seen(result):
    return json.loads(result.as_numpy("OUT")[0])


def test_requests_of_the_client_reach_the_model(api):
    module, client = api
    result = client.infer(
        "seen",
        inputs(module),
        model_version="1",
        request_id="mine",
        sequence_id=7,
        sequence_start=True,
        sequence_end=True,
        priority=2,
        timeout=5_000_000,
        parameters={"text": "é", "number": 3, "truth": True},
        headers={"x-anything": "1"},
    )
    identifier, correlation, flags, timeout, parameters = seen(result)
    assert (identifier, correlation, flags, timeout) == ("mine", 7, 3, 5_000_000)
    assert {"text": "é", "number": 3, "truth": True}.items() <= parameters.items()
    assert seen(client.infer("seen", inputs(module), sequence_id="name"))[1] == "name"


@pytest.mark.parametrize("way", [None, "gzip", "deflate"])
def test_compression(api, way):
    module, client = api
    given = {"compression_algorithm": way}
    if module is http_client:
        given = {"request_compression_algorithm": way, "response_compression_algorithm": way}
    assert seen(client.infer("seen", inputs(module, count=5000), request_id="c", **given))[0] == "c"


@pytest.fixture
def gate(server):
    gate = Gate(server.repositories[0] / "seen" / "1" / "gate")
    yield gate
    gate.open()


def test_a_time_limit_of_the_client(api, server, gate):
    module, client = api
    if module is http_client:
        with (
            module.InferenceServerClient(server.http_url, network_timeout=0.3) as hasty,
            pytest.raises((InferenceServerException, OSError), match=r"(?i)tim"),
        ):
            hasty.infer("seen", inputs(module, 1.0))
    else:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("seen", inputs(module, 1.0), client_timeout=0.3)
        assert client.is_server_live(client_timeout=150)
    gate.open()
    assert seen(client.infer("seen", inputs(module), request_id="after"))[0] == "after"


def test_a_plugin_adds_headers_to_every_call(api):
    module, client = api
    asked = []

    class Plugin(module.InferenceServerClientPlugin):
        def __call__(self, request):
            asked.append(dict(request.headers))
            request.headers["authorization"] = "Basic eDp5"

    client.register_plugin(Plugin())
    try:
        assert client.is_server_live()
        assert seen(client.infer("seen", inputs(module), request_id="p"))[0] == "p"
    finally:
        client.unregister_plugin()
    assert len(asked) == 2
    assert client.is_server_live()


def test_calls_that_are_cancelled_or_waited_for(server, gate):
    with http_client.InferenceServerClient(server.http_url, concurrency=3) as client:
        waiting = [
            client.async_infer("seen", inputs(http_client), request_id=str(n)) for n in range(9)
        ]
        assert [seen(each.get_result(timeout=150))[0] for each in waiting] == [*"012345678"]
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        answers = queue.Queue()

        def heard(result, error):
            answers.put((result, error))

        call = client.async_infer("seen", inputs(grpc_client, 5.0), heard)
        call.cancel()
        _, error = answers.get(timeout=150)
        assert "Locally cancelled by application" in str(error)
        client.start_stream(heard, stream_timeout=150, headers={"x-anything": "1"})
        client.async_stream_infer("seen", inputs(grpc_client, 1.0), request_id="s")
        client.stop_stream(cancel_requests=True)
        _, error = answers.get(timeout=150)
        assert "cancelled" in str(error).lower()
        gate.open()
        assert seen(client.infer("seen", inputs(grpc_client), request_id="after"))[0] == "after"


def test_query_parameters_are_no_part_of_the_path(server):
    extra = {"query_params": {"a": "b c", "n": 1}, "headers": {"X-Anything": "1"}}
    with http_client.InferenceServerClient(server.http_url) as client:
        assert client.is_server_live(**extra)
        assert client.is_server_ready(**extra)
        assert client.is_model_ready("seen", **extra)
        assert client.get_server_metadata(**extra)["name"] == "triton"
        assert client.get_model_metadata("seen", **extra)["name"] == "seen"
        assert client.get_model_config("seen", "1", **extra)["name"] == "seen"
        assert client.get_inference_statistics("seen", **extra)["model_stats"]
        assert client.get_model_repository_index(**extra)
        assert client.get_trace_settings("seen", **extra)
        assert client.get_log_settings(**extra)
        assert client.get_system_shared_memory_status(**extra) == []
        assert seen(client.infer("seen", inputs(http_client), request_id="q", **extra))[0] == "q"


def test_bodies_that_are_made_and_read_apart_from_a_client(server):
    kind = http_client.InferenceServerClient
    body, length = kind.generate_request_body(inputs(http_client), request_id="body")
    fields = {"Inference-Header-Content-Length": str(length)} if length else {}
    status, headers, answer = server.request("POST", "/v2/models/seen/infer", body, fields)
    assert status == 200
    length = next(
        int(value)
        for name, value in headers.items()
        if name.lower().endswith("header-content-length")
    )
    assert seen(kind.parse_response_body(answer, header_length=length))[0] == "body"


def test_channels_with_options_of_their_own(server):
    options = grpc_client.KeepAliveOptions(
        keepalive_time_ms=10_000, keepalive_timeout_ms=5000, keepalive_permit_without_calls=True
    )
    with grpc_client.InferenceServerClient(server.grpc_url, keepalive_options=options) as client:
        assert seen(client.infer("seen", inputs(grpc_client), request_id="k"))[0] == "k"
    arguments = [("grpc.max_receive_message_length", 40)]
    with grpc_client.InferenceServerClient(server.grpc_url, channel_args=arguments) as client:
        with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
            client.infer("seen", inputs(grpc_client))
        assert client.is_server_live()
