"""Traces of requests in a file: which, with what in them, and in which files."""

from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.process.controlled import only
from tests.process.ensembles import write_ensemble
from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_model

CODE = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if data.min() == -9:
                os._exit(3)
            if data.min() < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * data)]))
        return responses
"""
SEVERAL = """
import fcntl, os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()
            for value in data:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data[:1] * 0 + value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        fcntl.flock(open(os.path.dirname(__file__) + "/gate"), fcntl.LOCK_SH)
"""
CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        data = request.inputs()[0].as_numpy()
        for name, given in (("m", {"trace": request.trace()}), ("other", {})):
            call = pb_utils.InferenceRequest(
                request_id="called",
                model_name=name,
                inputs=[pb_utils.Tensor("IN", data)],
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


@pytest.fixture
def traced(tmp_path):
    """Start servers that trace into a file; returns a function of the further flags and of the models."""
    repository = tmp_path / "models"
    write_model(repository, "m", CODE)
    write_model(repository, "other", CODE)
    write_model(
        repository, "several", SEVERAL, config="model_transaction_policy { decoupled: true }"
    )
    write_model(repository, "calls", CALLS)
    write_chain(repository, "inner", "m", "calls")
    write_chain(repository, "outer", "inner", "m")
    file = tmp_path / "trace.json"

    def start(*config, models=("m",)):
        traces = [f"triton,file={file}", "rate=1", *config]
        flags = [flag for each in traces for flag in ("--trace-config", each)]
        return running_server(repository, *only(*models), *flags)

    start.file = file
    start.repository = repository
    return start


def write_chain(repository, name, first, second):
    """Write an ensemble of two models, one behind the other."""
    steps = f"{first} IN=IN > OUT=BETWEEN", f"{second} IN=BETWEEN > OUT=OUT"
    write_ensemble(repository, name, *steps, inputs="IN", outputs="OUT")


def ask(server, model="m", values=(1.5, 2), request_id="", client=over_http):
    url = server.http_url if client is over_http else server.grpc_url
    data = np.array(values, np.float32)
    given = client.InferInput("IN", [len(data)], "FP32")
    given.set_data_from_numpy(data)
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


def complete(path, count):
    """Wait until a file has so many traces; it is whole whenever it is looked at."""
    wait_until(lambda: path.exists() and path.stat().st_size, f"{path} to be there")
    wait_until(lambda: len(read(path)) >= count, f"{count} traces in {path}")
    return read(path)


def test_the_steps_of_a_request_in_their_order(traced):
    protocols = {
        "over HTTP": (over_http, "HTTP_RECV", "HTTP_SEND"),
        "over gRPC": (over_grpc, "GRPC_WAITREAD", "GRPC_SEND"),
    }
    with traced("level=TIMESTAMPS") as server:
        for request_id, (client, _, _) in protocols.items():
            ask(server, request_id=request_id, client=client)
        traces = complete(traced.file, 2).values()
    by_id = {trace["model"]["request_id"]: trace for trace in traces}
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
    with traced("level=TIMESTAMPS", "rate=2", models=("outer", "other")) as server:
        # The first is not traced: nor is anything that comes of it.
        for number in range(2):
            ask(server, "outer", request_id=str(number))
        traces = complete(traced.file, 6)
        ask(server, "outer")
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
    assert len(read(traced.file)) == 6


def test_an_ensemble_whose_client_is_gone_leaves_no_open_trace(traced):
    gate = Gate(traced.repository.parent / "gate")
    write_model(traced.repository, "slow", CODE.replace("data = pb", f"{gate.wait}; data = pb"))
    write_chain(traced.repository, "slowly", "slow", "slow")
    with traced("level=TIMESTAMPS", models=("slowly",)) as server:
        given = over_grpc.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.ones(1, np.float32))
        with (
            over_grpc.InferenceServerClient(server.grpc_url) as client,
            pytest.raises(InferenceServerException, match="Deadline"),
        ):
            client.infer("slowly", [given], client_timeout=0.2)
        gate.open()
        traces = complete(traced.file, 2)
    assert {t["model"]["model_name"] for t in traces.values()} == {"slow", "slowly"}
    assert all("REQUEST_END" in trace["stamps"] for trace in traces.values())


def test_tensors_that_go_in_and_come_out(traced):
    with traced("level=TENSORS") as server:
        ask(server)
        (trace,) = complete(traced.file, 1).values()
    assert trace["stamps"] == {}
    shaped = {"shape": "2", "dtype": "FP32"}
    assert trace["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1.5,2", **shaped}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": "3,4", **shaped}),
    ]


def test_every_response_of_a_decoupled_request(traced):
    answers, gate = queue.Queue(), Gate(traced.repository / "several" / "1" / "gate")
    with traced("level=TIMESTAMPS", "level=TENSORS", models=("several",)) as server:
        with over_grpc.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            given = over_grpc.InferInput("IN", [3], "FP32")
            given.set_data_from_numpy(np.array([5, 6, 7], np.float32))
            client.async_stream_infer("several", [given])
            for _ in range(3):
                assert answers.get(timeout=150)[1] is None
            gate.open()
            client.stop_stream()
        (trace,) = complete(traced.file, 1).values()
    outputs = [t["data"] for activity, t in trace["tensors"] if activity == "TENSOR_BACKEND_OUTPUT"]
    assert outputs == ["5", "6", "7"]
    of_batch = ("COMPUTE_START", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END")
    times = [trace["stamps"][name] for name in of_batch]
    assert times == sorted(times)


def test_one_request_of_so_many_and_no_more_than_the_count(traced):
    with traced("level=TIMESTAMPS", "rate=3", "count=2") as server:
        for number in range(1, 12):
            ask(server, request_id=str(number))
        _, _, body = server.request("GET", "/v2/trace/setting")
        assert json.loads(body)["trace_count"] == "0"
        # More are wanted.
        server.request("POST", "/v2/trace/setting", b'{"trace_count":"1","trace_rate":"1"}')
        ask(server, request_id="12")
        ask(server, request_id="13")
        traces = complete(traced.file, 3)
        assert server.stop() == 0
    assert [t["model"]["request_id"] for t in traces.values()] == ["3", "6", "12"]
    assert read(traced.file) == traces


def test_files_of_so_many_traces_and_what_is_left_at_the_end(traced):
    with traced("level=TIMESTAMPS", "triton,log-frequency=2") as server:
        for number in range(5):
            ask(server, request_id=str(number))
        assert server.stop() == 0
    ids = [
        [t["model"]["request_id"] for t in read(traced.file.with_suffix(f".json.{n}")).values()]
        for n in range(3)
    ]
    assert ids == [["0", "1"], ["2", "3"], ["4"]]
    assert not traced.file.exists()


def test_levels_of_one_model_at_run_time(traced):
    with traced(models=("m", "other")) as server:
        ask(server)
        level = b'{"trace_level":["TIMESTAMPS"]}'
        assert server.request("POST", "/v2/models/m/trace/setting", level)[0] == 200
        ask(server, "other")
        ask(server, "m", request_id="wanted")
        server.request("POST", "/v2/models/m/trace/setting", b'{"trace_level":null}')
        ask(server, "m")
        assert server.stop() == 0
    (trace,) = read(traced.file).values()
    assert trace["model"]["request_id"] == "wanted"


def test_requests_that_fail_are_traced_too_and_the_file_outlives_a_killed_server(traced):
    with traced("level=TIMESTAMPS") as server:
        with pytest.raises(InferenceServerException, match="negative"):
            ask(server, values=[-1], request_id="refused by the model")
        with pytest.raises(InferenceServerException, match="not healthy"):
            ask(server, values=[-9], request_id="the model died")
        complete(traced.file, 2)
        server.stop(9)
    refused, died = read(traced.file).values()
    assert refused["model"]["request_id"] == "refused by the model"
    assert set(STEPS) <= set(refused["stamps"])
    assert died["model"]["request_id"] == "the model died"
    assert "COMPUTE_START" not in died["stamps"]
    assert "REQUEST_END" in died["stamps"]


def test_many_at_once_are_all_there_and_complete(traced):
    with traced("level=TIMESTAMPS", "level=TENSORS") as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: ask(server, request_id=str(n)), range(200)))
        traces = complete(traced.file, 200)
    assert {t["model"]["request_id"] for t in traces.values()} == set(map(str, range(200)))
    assert {(t["count"], len(t["tensors"])) for t in traces.values()} == {(12, 2)}


def test_a_file_that_cannot_be_written_is_said_and_harms_nobody(tmp_path):
    repository = tmp_path / "models"
    write_model(repository, "m", CODE)
    flags = ("--trace-config", f"triton,file={tmp_path}/none/trace.json")
    levels = ("--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=1")
    with running_server(repository, *flags, *levels) as server:
        for _ in range(3):
            ask(server)
        wait_until(lambda: "traces are lost: cannot write" in server.log(), "the line", server)
        assert server.stop() == 0
        assert server.log().count("traces are lost") == 1
