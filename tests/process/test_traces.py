"""Traces of requests in a file: which, with what in them, and in which files."""

import json
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.process.ensembles import write_ensemble
from tests.process.gates import Gate, waiting_at
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, wait_until, write_model

CODE = """
if value.min() == -9:
    os._exit(3)
if value.min() < 0:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
return respond(OUT=2 * value)
"""
SEVERAL = """
for each in value:
    send(OUT=np.array([each]))
{wait}
"""
CALLS = """
for name, given in (("m", {"trace": request.trace()}), ("other", {})):
    call = pb_utils.InferenceRequest(
        request_id="called",
        model_name=name,
        inputs=request.inputs(),
        requested_output_names=["OUT"],
        **given,
    )
    answer = call.exec()
return pb_utils.InferenceResponse(answer.output_tensors())
"""
STEPS = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "INFER_RESPONSE_COMPLETE",
    "COMPUTE_END",
    "REQUEST_END",
]


class Traced:
    """A server that traces into a file, as it is told while it runs."""

    def __init__(self, server, file, gate):
        self.server = server
        self.gate = gate
        self._file = file
        self._earlier = set()

    def set(self, model="", **settings):
        """Change settings, named without ``trace_``; None sets one back."""
        names = {name: name if name == "log_frequency" else f"trace_{name}" for name in settings}
        path = f"/v2{model and '/models/'}{model}/trace/setting"
        body = json.dumps({names[name]: value for name, value in settings.items()})
        assert self.server.request("POST", path, body)[0] == 200

    def complete(self, count):
        """Wait until the file has so many traces of this test; it is whole whenever it is looked at."""
        wait_until(lambda: len(self.traces()) >= count, f"{count} traces", self.server)
        return self.traces()

    def traces(self):
        written = read(self._file) if self._file.exists() else {}
        return {number: trace for number, trace in written.items() if number not in self._earlier}

    def forget(self):
        self._earlier |= set(self.traces())
        self.set(level=None, rate=None, count=None)


@pytest.fixture(scope="module")
def tracing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    repository = folder / "models"
    gate = folder / "gate"
    for name in ("m", "other"):
        write_model(repository, name, answering(CODE))
    write_model(repository, "slow", answering(f"{waiting_at(gate)}\n{CODE}"))
    several = sending(SEVERAL.format(wait=waiting_at(gate)))
    write_model(
        repository, "several", several, config="model_transaction_policy { decoupled: true }"
    )
    write_model(repository, "calls", answering(CALLS))
    write_chain(repository, "inner", "m", "calls")
    write_chain(repository, "outer", "inner", "m")
    write_chain(repository, "slowly", "slow", "slow")
    flags = [f"--trace-config={each}" for each in (f"triton,file={folder / 'trace'}", "rate=1")]
    with running_server(repository, *flags) as server:
        yield Traced(server, folder / "trace", gate)


@pytest.fixture
def traced(tracing):
    yield tracing
    tracing.forget()


def write_chain(repository, name, first, second):
    """Write an ensemble of two models, one behind the other."""
    steps = f"{first} IN=IN > OUT=BETWEEN", f"{second} IN=BETWEEN > OUT=OUT"
    write_ensemble(repository, name, *steps, inputs="IN", outputs="OUT")


def ask(server, model="m", values=(1.5, 2), request_id="", client=over_http):
    url = server.http_url if client is over_http else server.grpc_url
    data = np.array(values, np.float32)
    given = client.InferInput("IN", [len(data)], "FP32").set_data_from_numpy(data)
    with client.InferenceServerClient(url) as connection:
        return connection.infer(model, [given], request_id=request_id)


def read(path):
    """The traces of a file: what is said of each by its id."""
    traces = {}
    for record in json.loads(path.read_text()):
        trace = traces.setdefault(record["id"], {"stamps": {}, "tensors": [], "count": 0})
        for stamp in record.get("timestamps", ()):
            trace["count"] += 1
            trace["stamps"][stamp["name"]] = stamp["ns"]
        if "activity" in record:
            trace["tensors"].append((record["activity"], record["tensor"]))
        if "model_name" in record:
            trace["model"] = {k: v for k, v in record.items() if k != "id"}
    return traces


def test_the_steps_of_a_request_in_their_order(traced):
    protocols = {
        "over HTTP": (over_http, "HTTP_RECV", "HTTP_SEND"),
        "over gRPC": (over_grpc, "GRPC_WAITREAD", "GRPC_SEND"),
    }
    traced.set(level=["TIMESTAMPS"])
    for request_id, (client, _, _) in protocols.items():
        ask(traced.server, request_id=request_id, client=client)
    by_id = {trace["model"]["request_id"]: trace for trace in traced.complete(2).values()}
    assert set(by_id) == set(protocols)
    for request_id, (_, received, sent) in protocols.items():
        trace = by_id[request_id]
        assert trace["model"] == {
            "model_name": "m", "model_version": 1, "request_id": request_id,
        }  # fmt: skip
        stamps = trace["stamps"]
        assert trace["tensors"] == []
        order = [f"{received}_START", f"{received}_END", *STEPS]
        assert set(stamps) == {*order, f"{sent}_START", f"{sent}_END"}
        assert [stamps[name] for name in order] == sorted(stamps[name] for name in order)
        assert stamps["INFER_RESPONSE_COMPLETE"] <= stamps[f"{sent}_START"] <= stamps[f"{sent}_END"]


def test_calls_of_a_traced_request_are_traced_with_it(traced):
    traced.set(level=["TIMESTAMPS"], rate="2")
    # The first is not traced: nor is anything that comes of it.
    for number in range(2):
        ask(traced.server, "outer", request_id=str(number))
    traces = traced.complete(6)
    ask(traced.server, "outer")
    by_id = {number: trace["model"] for number, trace in traces.items()}
    families = [
        (model["model_name"], by_id.get(model.get("parent_id"), {}).get("model_name"))
        for model in by_id.values()
    ]
    assert sorted(families, key=str) == [
        ("calls", "inner"),
        ("inner", "outer"),
        ("m", "calls"),
        ("m", "inner"),
        ("m", "outer"),
        ("outer", None),
    ]
    for trace in traces.values():
        model = trace["model"]
        called = by_id.get(model.get("parent_id"), {}).get("model_name") == "calls"
        assert model["request_id"] == ("called" if called else "1")
        stamps = set(trace["stamps"])
        if model["model_name"] in ("inner", "outer"):
            assert stamps >= {"REQUEST_START", "QUEUE_START", "REQUEST_END"}
            assert "COMPUTE_START" not in stamps
        else:
            assert stamps == {*STEPS} - {"INFER_RESPONSE_COMPLETE"}
        if "parent_id" in model:
            outer = traces[model["parent_id"]]["stamps"]
            assert outer["REQUEST_START"] <= trace["stamps"]["REQUEST_START"]
    assert len(traced.traces()) == 6


def test_an_ensemble_whose_client_is_gone_leaves_no_open_trace(traced):
    gate = Gate(traced.gate)
    traced.set(level=["TIMESTAMPS"])
    given = over_grpc.InferInput("IN", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    with (
        over_grpc.InferenceServerClient(traced.server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="Deadline"),
    ):
        client.infer("slowly", [given], client_timeout=0.2)
    gate.open()
    traces = traced.complete(2)
    assert {t["model"]["model_name"] for t in traces.values()} == {"slow", "slowly"}
    assert all("REQUEST_END" in trace["stamps"] for trace in traces.values())


def test_tensors_that_go_in_and_come_out(traced):
    traced.set(level=["TENSORS"])
    ask(traced.server)
    (trace,) = traced.complete(1).values()
    assert trace["stamps"] == {}
    shaped = {"shape": "2", "dtype": "FP32"}
    assert trace["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1.5,2", **shaped}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": "3,4", **shaped}),
    ]


def test_every_response_of_a_decoupled_request(traced):
    answers, gate = queue.Queue(), Gate(traced.gate)
    traced.set(level=["TIMESTAMPS", "TENSORS"])
    with over_grpc.InferenceServerClient(traced.server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        given = over_grpc.InferInput("IN", [3], "FP32")
        given.set_data_from_numpy(np.array([5, 6, 7], np.float32))
        client.async_stream_infer("several", [given])
        for _ in range(3):
            assert answers.get(timeout=150)[1] is None
        gate.open()
        client.stop_stream()
    (trace,) = traced.complete(1).values()
    outputs = [t["data"] for activity, t in trace["tensors"] if activity == "TENSOR_BACKEND_OUTPUT"]
    assert outputs == ["5", "6", "7"]
    of_batch = ("COMPUTE_START", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END")
    times = [trace["stamps"][name] for name in of_batch]
    assert times == sorted(times)


def test_files_of_so_many_traces_and_what_is_left_at_the_end(tmp_path):
    write_model(tmp_path / "models", "m", answering(CODE))
    config = (
        f"triton,file={tmp_path / 't'}",
        "triton,log-frequency=2",
        "rate=1",
        "level=TIMESTAMPS",
    )
    flags = [f"--trace-config={each}" for each in config]
    with running_server(tmp_path / "models", *flags, own=True) as server:
        for number in range(5):
            ask(server, request_id=str(number))
        assert server.stop() == 0
    ids = [[t["model"]["request_id"] for t in read(tmp_path / f"t.{n}").values()] for n in range(3)]
    assert ids == [["0", "1"], ["2", "3"], ["4"]]
    assert not (tmp_path / "t").exists()


def test_requests_that_fail_are_traced_too(traced):
    traced.set(level=["TIMESTAMPS"])
    with pytest.raises(InferenceServerException, match="negative"):
        ask(traced.server, values=[-1], request_id="refused by the model")
    with pytest.raises(InferenceServerException, match="not healthy"):
        ask(traced.server, "other", values=[-9], request_id="the model died")
    refused, died = traced.complete(2).values()
    assert refused["model"]["request_id"] == "refused by the model"
    assert set(STEPS) <= set(refused["stamps"])
    assert died["model"]["request_id"] == "the model died"
    assert "COMPUTE_START" not in died["stamps"]
    assert "REQUEST_END" in died["stamps"]
    wait_until(lambda: traced.server.is_ready("other"), "another stub to start", traced.server)


def test_many_at_once_are_all_there_and_complete(traced):
    traced.set(level=["TIMESTAMPS", "TENSORS"])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ask(traced.server, request_id=str(n)), range(100)))
    traces = traced.complete(100)
    assert {t["model"]["request_id"] for t in traces.values()} == set(map(str, range(100)))
    assert {(t["count"], len(t["tensors"])) for t in traces.values()} == {(12, 2)}
