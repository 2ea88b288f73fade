"""Spans of requests at an OpenTelemetry collector: which, of what, and below which."""

import json
import socket
import sys
import time

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from gpubridge.telemetry.settings import OpenTelemetrySettings, TraceSettings
from gpubridge.telemetry.traces import Traces
from tests.commands import run_command
from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering, sending
from tests.process.otlp import collector
from tests.process.server import PURE, running_server, wait_until, write_model

CODE = answering("""
if value.min() < 0:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
return respond({"context": json.dumps(request.trace().get_context())}, OUT=2 * value)
""")
SPANS = answering("""
with request.span("outer", {"n": len(value), "exact": True}) as outer:
    outer.set_attribute("late", "\\ud800" + "x" * 5000)
    with request.span("inner", {"half": 0.5}):
        call = pb_utils.InferenceRequest(
            model_name="m", inputs=[pb_utils.Tensor("IN", value)],
            requested_output_names=["OUT"], trace=request.trace())
        answer = call.exec()
try:
    with request.span("fails"):
        raise KeyError("lost")
except KeyError:
    pass
for wrong in ((1,), ("a", {"k": None}), ("a", {1: 2}), ("a", {"k": 1 << 64})):
    try:
        request.span(*wrong)
    except TypeError:
        pass
    else:
        raise AssertionError(wrong)
return pb_utils.InferenceResponse(answer.output_tensors())
""")
SEVERAL = sending("""
for each in value:
    with request.span(f"step {each:g}"):
        send(OUT=value[:1])
""")
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=a,other=b"}
UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{CALLER}-00"}
SERVER, INTERNAL = 2, 1


def config(*entries):
    """The flags of trace settings."""
    return [flag for entry in entries for flag in ("--trace-config", entry)]


@pytest.fixture(scope="module")
def received():
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    models = tmp_path_factory.mktemp("traced") / "models"
    write_model(models, "m", CODE)
    write_model(models, "spans", SPANS)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(models, "several", SEVERAL, config=decoupled)
    steps = "m IN=IN > OUT=BETWEEN", "spans IN=BETWEEN > OUT=OUT"
    write_ensemble(models, "chain", *steps, inputs="IN", outputs="OUT")
    return models


@pytest.fixture(scope="module")
def flags(received):
    return config(
        "mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={received.url}",
        "opentelemetry,resource=service.name=mine", "opentelemetry,resource=k=v=w",
        "opentelemetry,bsp_schedule_delay=20", "opentelemetry,bsp_max_queue_size=4000",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(repository, flags):
    with running_server(repository, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def pure(repository, flags):
    with running_server(repository, *flags, environment=PURE) as running:
        yield running


@pytest.fixture
def either(request):
    """The server, and one whose models are of the Python runtime."""
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("either", ["server", "pure"], indirect=True)


def ask(server, model="m", values=(1.5, 2), headers=None, client=over_http, **given):
    url = server.http_url if client is over_http else server.grpc_url
    data = np.array(values, np.float32)
    tensor = client.InferInput("IN", [len(data)], "FP32").set_data_from_numpy(data)
    with client.InferenceServerClient(url) as connection:
        return connection.infer(model, [tensor], headers=dict(headers or {}) or None, **given)


def named(spans, *path):
    """The span below those of a path of names, which starts without a parent in the trace."""
    parent = None
    for name in path:
        below = [
            span
            for span in spans.values()
            if span.name == name
            and (span.parent_id == parent if parent else span.parent_id not in spans)
        ]
        assert len(below) == 1, (path, name, spans)
        parent = below[0].span_id
    return below[0]


@both
@pytest.mark.parametrize("client", [over_http, over_grpc])
def test_a_request_of_a_sampled_context_is_traced_below_it(either, received, client):
    headers = dict(SAMPLED)
    ask(either)
    before = time.time_ns()
    answer = ask(either, headers=headers, client=client, request_id="mine")
    spans = received.trace(4, TRACE)
    root = named(spans, "InferRequest")
    assert before < root.start
    assert root.end < time.time_ns()
    assert (root.parent_id, root.kind, root.state) == (CALLER, SERVER, SAMPLED["tracestate"])
    assert root.resource["service.name"] == "mine"
    assert root.resource["k"] == "v=w"
    received_by = "HTTP_RECV" if client is over_http else "GRPC_WAITREAD"
    protocol = received_by.partition("_")[0]
    assert root.events == [
        f"{received_by}_START", f"{received_by}_END", "INFER_RESPONSE_COMPLETE",
        f"{protocol}_SEND_START", f"{protocol}_SEND_END",
    ]  # fmt: skip
    model = named(spans, "InferRequest", "m")
    assert model.kind == INTERNAL
    assert model.events == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    number = model.attributes.pop("triton.trace_id")
    assert number > 0
    assert model.attributes == {
        "triton.model_name": "m",
        "triton.model_version": 1,
        "triton.request_id": "mine",
        "triton.trace_parent_id": 0,
    }
    queue, compute = (named(spans, "InferRequest", "m", name) for name in ("queue", "compute"))
    assert queue.end == compute.start
    assert compute.events == [
        "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    ]  # fmt: skip
    assert compute.attributes["gpubridge.batch_requests"] == 1
    assert not any(span.failed for span in spans.values())
    response = answer.get_response()
    if client is over_http:
        context = json.loads(json.loads(response["parameters"]["context"]))
        assert context == {
            "traceparent": f"00-{TRACE}-{model.span_id}-01",
            "tracestate": SAMPLED["tracestate"],
        }


@pytest.mark.parametrize("client", [over_http, over_grpc])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        UNSAMPLED,
        {"traceparent": "00-xx"},
        {"traceparent": f"ff-{'2' * 32}-{CALLER}-01"},
        {"traceparent": f"00-{'0' * 32}-{CALLER}-01"},
        {"traceparent": f"00-{'2' * 32}-{CALLER}-01-more"},
    ],
)
def test_other_requests_are_not_traced_at_rate_0(server, received, client, headers):
    answer = ask(server, headers=headers, client=client)
    if client is over_http:
        assert answer.get_response()["parameters"] == {"context": "null"}
    # Spans are exported in order.
    ask(server, headers=SAMPLED)
    received.trace(4, TRACE)
    assert not received.spans


@both
def test_calls_and_spans_of_a_model_are_below_its_own(either, received):
    ask(either, "spans", headers=SAMPLED)
    spans = received.trace(10)
    path = "InferRequest", "spans"
    outer = named(spans, *path, "outer")
    assert outer.attributes == {"n": 2, "exact": True, "late": "?" + "x" * 4095}
    inner = named(spans, *path, "outer", "inner")
    assert inner.attributes == {"half": 0.5}
    called = named(spans, *path, "outer", "inner", "m")
    caller = named(spans, *path)
    assert called.attributes["triton.trace_parent_id"] == caller.attributes["triton.trace_id"]
    named(spans, *path, "outer", "inner", "m", "compute")
    fails = named(spans, *path, "fails")
    assert (fails.failed, fails.message) == (True, "KeyError: 'lost'")
    assert not outer.failed
    compute = named(spans, *path, "compute")
    assert compute.start <= outer.start
    assert fails.end <= compute.end


def test_members_of_an_ensemble_are_below_it(server, received):
    ask(server, "chain", headers=SAMPLED)
    spans = received.trace(4 + 10)
    named(spans, "InferRequest", "chain", "m", "compute")
    named(spans, "InferRequest", "chain", "spans", "outer", "inner", "m", "queue")
    assert len([span for span in spans.values() if span.kind == SERVER]) == 1


@both
def test_a_decoupled_model_is_traced_to_its_last_response(either, received):
    answers = []
    with over_grpc.InferenceServerClient(either.grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.append(error or result), headers=dict(SAMPLED)
        )
        data = np.array([1, 2, 3], np.float32)
        tensor = over_grpc.InferInput("IN", [3], "FP32").set_data_from_numpy(data)
        client.async_stream_infer("several", [tensor])
        spans = received.trace(4 + 3)
    assert len(answers) == 3
    root = named(spans, "InferRequest")
    assert root.events.count("INFER_RESPONSE_COMPLETE") == 3
    steps = [named(spans, "InferRequest", "several", f"step {n}") for n in (1, 2, 3)]
    assert steps[0].end <= steps[1].start
    assert steps[1].end <= steps[2].start


def test_generate_requests_are_traced(server, received):
    body = json.dumps({"IN": [1.0]})
    # Python sees all of them.
    for headers in (UNSAMPLED, {}):
        status, _, _ = server.request("POST", "/v2/models/m/generate", body, headers)
        assert status == 200
    status, _, _ = server.request("POST", "/v2/models/m/generate", body, SAMPLED)
    assert status == 200
    assert named(received.trace(4, TRACE), "InferRequest").parent_id == CALLER
    assert not received.spans


@pytest.mark.parametrize("client", [over_http, over_grpc])
def test_an_error_is_the_status_of_the_spans(server, received, client):
    with pytest.raises(InferenceServerException, match="negative"):
        ask(server, values=[-1], headers=SAMPLED, client=client)
    spans = received.trace(4)
    for path in (["InferRequest"], ["InferRequest", "m"]):
        assert (named(spans, *path).failed, named(spans, *path).message) == (True, "negative")
    assert not named(spans, "InferRequest", "m", "compute").failed


def test_settings_are_shown_and_keep_their_mode(server, received):
    _, _, body = server.request("GET", "/v2/trace/setting")
    expected = {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "0",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": received.url,
        "bsp_max_queue_size": "4000",
        "bsp_schedule_delay": "20",
        "bsp_max_export_batch_size": "512",
    }
    assert json.loads(body) == expected
    for wrong in ({"trace_mode": "triton"}, {"trace_level": ["TENSORS"]}):
        status, _, body = server.request("POST", "/v2/trace/setting", json.dumps(wrong))
        assert status in (400, 501)
        assert "opentelemetry" in body.decode().lower()
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        kept = client.update_trace_settings(settings={"trace_mode": "opentelemetry"}, as_json=True)
    assert kept["settings"]["trace_rate"]["value"] == ["0"]
    try:
        server.request("POST", "/v2/trace/setting", json.dumps({"trace_level": ["OFF"]}))
        ask(server, headers=SAMPLED)
    finally:
        server.request("POST", "/v2/trace/setting", json.dumps({"trace_level": None}))
    ask(server, headers=SAMPLED, request_id="after")
    spans = received.trace(4)
    assert named(spans, "InferRequest", "m").attributes["triton.request_id"] == "after"


def test_one_of_so_many_requests_is_traced(server, received):
    server.request("POST", "/v2/trace/setting", json.dumps({"trace_rate": "5"}))
    try:
        with over_http.InferenceServerClient(server.http_url) as client:
            tensor = over_http.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.ones(1, np.float32))
            for number in range(1, 15):
                client.infer("m", [tensor], request_id=str(number))
                client.infer("m", [tensor], request_id="unsampled", headers=dict(UNSAMPLED))
        # They are exported in order.
        ask(server, headers=SAMPLED)
        received.trace(4, TRACE)
        chosen = [span.attributes.get("triton.request_id") for span in received.spans]
        assert {number for number in chosen if number} <= {str(n) for n in range(1, 15)}
        roots = [span for span in received.spans if span.name == "InferRequest"]
        assert {root.parent_id for root in roots} == {""}
        # Requests whose context is not sampled are counted with the others by the data plane.
        assert 2 <= len(roots) <= 5
    finally:
        server.request("POST", "/v2/trace/setting", json.dumps({"trace_rate": None}))
        received.spans.clear()


class Traced:
    """Traces of all requests, of which the collector at ``url`` gets the spans."""

    def __init__(self, url, **settings):
        export = OpenTelemetrySettings(url=url, **settings)
        self._traces = Traces(
            TraceSettings(level=("TIMESTAMPS",), rate=1, mode="opentelemetry", opentelemetry=export)
        )
        self.close = self._traces.close

    def request(self):
        trace = self._traces.sample("m", 1, "")
        trace.stamp("REQUEST_START")
        trace.stamp("REQUEST_END")
        trace.end()


def test_a_dead_collector_is_one_line(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    lost = Traced(url, bsp_schedule_delay=10, bsp_max_queue_size=8, bsp_max_export_batch_size=8)
    for _ in range(2):
        for _ in range(20):
            lost.request()
        wait_until(lambda: "collector" in caplog.text, "a line of the log")
    lost.close()
    assert caplog.text.count("traces do not reach the collector") == 1
    assert "Traceback" not in caplog.text


def test_what_is_queued_is_exported_at_the_end():
    with collector() as received:
        queued = Traced(received.url, bsp_schedule_delay=600_000)
        for _ in range(3):
            queued.request()
        assert not received.spans
        queued.close()
        assert len({span.trace_id for span in received.spans}) == 3
        assert received.spans[0].resource["service.name"] == "triton-inference-server"


def test_without_opentelemetry_the_server_says_what_to_install(repository, tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'opentelemetry'\", name='opentelemetry')"
    )
    command = [sys.executable, "-m", "gpubridge", "serve", "--model-repository", str(repository)]
    ended = run_command(
        [*command, *config("mode=opentelemetry")],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 1
    text = ended.stdout + ended.stderr
    assert "the package opentelemetry is missing: pip install 'gpubridge[otel]'" in text
    assert "Traceback" not in text
