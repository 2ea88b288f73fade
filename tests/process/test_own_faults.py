"""A request that fails by a bug of gpubridge is an error of that request alone.

A server with faults planted in its own code: in what takes, makes, writes for a stub and answers the
requests of models named for them. Other requests of the same connections, of the same streams, and of the
same batches, are answered.
"""

import json
import queue

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from tests.process.ensembles import TEXT, write_ensemble
from tests.process.raw_http import connected, read_answers
from tests.process.server import (
    STARTED,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)

PLANTED = """
import sys

if "serve" in sys.orig_argv:
    from gpubridge.engine.memory.region_announcer import RegionAnnouncer
    from gpubridge.engine.ensemble.ensemble_model import EnsembleModel
    from gpubridge.engine.models.model import StubModel
    from gpubridge.frontend import generate, generate_endpoint, infer
    from gpubridge.frontend.bls.requests import CalledModels
    from gpubridge.frontend.grpc import infer as grpc_infer, packing
    from gpubridge.protocol import generate as protocol_generate, infer_request
    from gpubridge.protocol.grpc import infer_request as grpc_request
    from gpubridge.transport.context import RequestContext

    def plant(owner, name, model_of, fault):
        planted = getattr(owner, name)

        def changed(*given, **named):
            if model_of(*given) == fault:
                raise ZeroDivisionError("planted")
            return planted(*given, **named)

        setattr(owner, name, changed)

    plant(infer_request.FormCache, "parse", lambda self, *_: self._config.name, "parse")
    plant(grpc_request.FormCache, "known", lambda _, read: read.model.config.name, "parse")
    plant(grpc_request.FormCache, "_known", lambda _, read: read.model.config.name, "parse")
    plant(protocol_generate, "parse_generate", lambda _, config: config.name, "parse")
    plant(infer, "plain_template", lambda *given: given[2].name, "encode")
    plant(grpc_infer, "plain_template", lambda *given: given[1].name, "encode")
    for module in (infer, packing):
        plant(module, "encode_response", lambda *given: given[3].name, "encode")
    plant(generate, "encode_generated", lambda *given: given[2].name, "encode")
    plant(generate_endpoint, "generated_template", lambda _, config, version: config.name, "encode")
    plant(EnsembleModel, "response", lambda self, *_: self.name, "flow")
    plant(EnsembleModel, "member_request", lambda self, call, *_: call.step.model, "second")
    plant(EnsembleModel, "begin", lambda self, *_: self.name, "taken")
    plant(EnsembleModel, "_plan", lambda self, *_: self.name, "course")
    instance = lambda told: getattr(getattr(told._user, "_owner", None), "_instance", None)
    plant(RegionAnnouncer, "name", lambda self, *_: instance(self) and instance(self).name, "send_0")
    plant(RequestContext, "encoded", lambda self: "fault" in (self.parameters or ""), True)
    plant(StubModel, "_is_prepared", lambda self, *_: self.name, "prepare")
    plant(CalledModels, "form", lambda self, record, *_: record.context.model, "call")
    # Of the task that keeps an instance running: each of these once.
    from gpubridge.engine.devices.manager import DeviceManager
    from gpubridge.engine.ipc.stub_connection import StubConnection
    from gpubridge.engine.models.dispatcher import Dispatcher
    from gpubridge.engine.supervisor.instance import Instance

    kept = ["join", "_fail_in_flight", "_use_replacement", "drain", "on_death"]
    due = lambda step: lambda self, *given: (
        "kept_0" in (getattr(self, "name", ""), *(getattr(each, "name", "") for each in given))
        and step in kept and not kept.remove(step) and step)
    for owner, step in (
        (DeviceManager, "join"), (Instance, "_fail_in_flight"), (Instance, "_use_replacement"),
        (Dispatcher, "on_death"),
    ):
        plant(owner, step, due(step), step)
    plant(StubConnection, "drain", lambda self, then: due("drain")(then.func.__self__._instance), "drain")
"""
MODELS = ("good", "parse", "encode", "prepare", "send")
COUNT = 6
LARGE = 1 << 20
# With the histogram all requests are prepared; four of the large requests fit.
FLAGS = "--metrics-config=histogram_latencies=true", f"--request-arena-limit={4 * LARGE}"
SAYS = "is a bug of gpubridge, not of the request: the server's log has its traceback"


ENSEMBLES = {
    **dict.fromkeys(("flow", "taken", "course"), ("good IN=IN > OUT=OUT",)),
    "first": ("second IN=IN > OUT=OUT",),
    "steps": ("good IN=IN > OUT=between", "second IN=between > OUT=OUT"),
}


BATCHED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = np.full((1, 1), len(requests), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)]) for _ in requests]
"""
OLDEST = "oldest { max_candidate_sequences: 4 }"
BATCHES = {
    "batch": "dynamic_batching { preserve_ordering: true max_queue_delay_microseconds: 60000000 "
    "preferred_batch_size: [4] }",
    "direct": "sequence_batching { direct { } }",
    "oldest": f"sequence_batching {{ {OLDEST} }}",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(PLANTED)
    for name in (*MODELS, "second", "call", "kept"):
        write_code_model(folder / "models", name)
    for name, config in BATCHES.items():
        tensors, config_of_four = "IN INT32 [1] > OUT INT32 [1]", f"max_batch_size: 4 {config}"
        write_model(folder / "models", name, BATCHED, config=config_of_four, tensors=tensors)
    for name, steps in ENSEMBLES.items():
        write_ensemble(folder / "models", name, *steps, inputs="IN", outputs="OUT", kind=TEXT)
    with running_server(
        folder / "models", *FLAGS, environment={"PYTHONPATH": str(folder)}, command=STARTED
    ) as running:
        yield running
        log = running.log()
        assert "ZeroDivisionError: planted" in log
        assert "a request failed by a bug of gpubridge" in log
        assert "Fatal error" not in log
        assert "Exception in callback" not in log
        for name in MODELS:
            assert (
                running.metrics()[f'gpubridge_queued_requests{{model="{name}",version="1"}}'] == 0
            )


def infer_body(code="self.said = 'good'", **more):
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
    return json.dumps({"inputs": [tensor], **more}).encode()


def answers(server, asked):
    """Send requests in one go; returns the status and the body of each answer."""
    with connected(server.http_url) as client:
        for path, body in asked:
            head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % (path.encode(), len(body)) + body)
        yield from read_answers(client, len(asked))


def test_an_instance_goes_on(server):
    """Whatever fails in what keeps it running: its requests get an error, and another process is started."""
    ended = [
        *answers(server, [("/v2/models/kept/infer", infer_body("import os; os._exit(3)"))] * 6)
    ]
    assert {status for status, _ in ended} <= {500, 503}
    wait_until(lambda: server.is_ready("kept"), "the instance", server)
    assert server.ask("self.said = 'kept'", "kept") == (200, "kept")
    for what in ("run", "stop"):
        assert f"a {what} of instance 'kept_0' failed by a bug of gpubridge" in server.log()
    assert "a look at a dead process's messages failed by a bug of gpubridge" in server.log()


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("faulty", [*MODELS[1:], *ENSEMBLES])
def test_the_others_of_a_pipeline_are_answered(server, faulty, binary):
    body = infer_body(parameters={"binary_data_output": binary})
    asked = [f"/v2/models/{name}/infer" for name in ("good", faulty, "good", faulty, "good")]
    got = list(answers(server, [(path, body) for path in asked]))
    assert [status for status, _ in got] == [200, 500, 200, 500, 200]
    for status, text in got:
        assert (SAYS in json.loads(text)["error"]) if status == 500 else b"good" in text


@pytest.mark.parametrize("faulty", ["parse", "encode"])
def test_generate_fails_alone(server, faulty):
    body = json.dumps({"IN": "self.said = 'good'"}).encode()
    asked = [f"/v2/models/{name}/generate" for name in ("good", faulty, "good")]
    got = list(answers(server, [(path, body) for path in asked]))
    assert [status for status, _ in got] == [200, 500, 200]
    assert SAYS in json.loads(got[1][1])["error"]


def tensors(code="self.said = 'good'"):
    made = grpc.InferInput("IN", [1], "BYTES")
    made.set_data_from_numpy(np.array([code.encode()], dtype=object))
    return [made]


@pytest.mark.parametrize("faulty", [*MODELS[1:], *ENSEMBLES])
def test_the_other_calls_of_an_http2_connection_are_answered(server, faulty):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        got = queue.Queue()
        names = ["good", faulty] * COUNT
        for index, name in enumerate(names):
            client.async_infer(
                name,
                tensors("self.said = 'good'"),
                lambda result, error, index=index: got.put((index, result, error)),
            )
        for _ in names:
            index, result, error = got.get(timeout=60)
            if names[index] == "good":
                assert error is None, error
                assert result.as_numpy("OUT").tolist() == [b"good"]
            else:
                assert error.status() == "StatusCode.INTERNAL"
                assert SAYS in error.message()


@pytest.mark.parametrize("faulty", MODELS[1:])
def test_the_other_requests_of_a_stream_are_answered(server, faulty):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        got = queue.Queue()
        client.start_stream(lambda result, error: got.put((result, error)))
        names = ["good", faulty, "good", faulty, "good"]
        for name in names:
            client.async_stream_infer(name, tensors())
        for name in names:
            result, error = got.get(timeout=60)
            if name == "good":
                assert error is None, error
                assert result.as_numpy("OUT").tolist() == [b"good"]
            else:
                assert SAYS in str(error)
        client.stop_stream()


def large_body():
    text = b"self.said = 'good' #".ljust(LARGE * 3 // 4, b"x")
    data = len(text).to_bytes(4, "little") + text
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    return json.dumps({"inputs": [tensor]}).encode(), data


@pytest.mark.parametrize("faulty", [*MODELS[1:], *ENSEMBLES])
def test_memory_of_failed_requests_goes_back(server, faulty):
    """More of them fail, one after the other, than the server has memory for."""
    header, data = large_body()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    for _ in range(6):
        status, _, body = server.request(
            "POST", f"/v2/models/{faulty}/infer", header + data, headers
        )
        assert (status, SAYS in json.loads(body)["error"]) == (500, True), body
    with grpc.InferenceServerClient(server.grpc_url) as client:
        given = tensors(data[4:].decode())
        for _ in range(6):
            with pytest.raises(InferenceServerException, match="bug of gpubridge"):
                client.infer(faulty, given)
    assert server.ask("self.said = 'good'", "good") == (200, "good")


def number(**parameters):
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def test_the_others_of_a_batch_are_executed_in_one(server):
    # What stays of the second batch is one request.
    faulty = [1, 4, 5, 6]
    asked = [number(**({"fault": 1} if each in faulty else {})) for each in range(8)]
    got = list(answers(server, [("/v2/models/batch/infer", body) for body in asked]))
    assert [each for each, (status, _) in enumerate(got) if status == 500] == faulty
    for status, text in got:
        assert status == 200 or SAYS in json.loads(text)["error"]
    sizes = [json.loads(text)["outputs"][0]["data"] for status, text in got if status == 200]
    assert sizes == [[3]] * 3 + [[1]]
    # A batch of which nothing is left keeps no instance from the next one.
    asked = [number(fault=1)] * 4 + [number()] * 4
    got = list(answers(server, [("/v2/models/batch/infer", body) for body in asked]))
    assert [status for status, _ in got] == [500] * 4 + [200] * 4


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_the_other_requests_of_sequences_are_answered(server, model):
    steps = ["sequence_start", "fault", "other", "fault", "sequence_end"]
    for sequence in range(1, 7):
        asked = [number(sequence_id=sequence, **{step: True}) for step in steps]
        got = list(answers(server, [(f"/v2/models/{model}/infer", body) for body in asked]))
        assert [status for status, _ in got] == [200, 500, 200, 500, 200], got


def test_the_call_of_a_model_is_answered(server):
    code = """
given = [pb_utils.Tensor("IN", np.array([b"self.said = 'called'"], np.object_))]
call = lambda model: pb_utils.InferenceRequest(
    model_name=model, requested_output_names=["OUT"], inputs=given).exec()
error = call("call").error()
self.said = error.code().name, error.message(), call("second").output_tensors()[0].as_numpy().tolist()
"""
    said = "the server could not take the call: ZeroDivisionError('planted')"
    assert server.ask(code, "good") == (200, str(("INTERNAL", said, [b"called"])))
    assert "A model's call failed in the server" in server.log()
