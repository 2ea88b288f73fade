"""Readiness as a model reports it itself."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from tests.process.server import running_server, wait_until, write_model

MODEL = """
import asyncio, os, sys, threading, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        self.asked = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            time.sleep(float(x.flat[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
        return responses

    def answer(self):
        self.asked += 1
        print("asked", self.asked, flush=True)
        with open(self.folder + "/answer") as file:
            return eval(file.read())

    {is_ready}
"""
SYNC = """
    def is_ready(self):
        return self.answer()
"""
ASYNC = """
    async def is_ready(self):
        await asyncio.sleep(0.01)
        return self.answer()
"""


@pytest.fixture(params=[SYNC, ASYNC], ids=["sync", "async"])
def served(request, tmp_path):
    """A server, and what sets the answers of its model."""
    directory = write_model(tmp_path, "m", MODEL.format(is_ready=request.param.strip()))

    def answer(code):
        (directory / "new").write_text(code)
        (directory / "new").rename(directory / "answer")

    answer("True")
    with running_server(tmp_path) as server:
        yield server, answer


def ready_over_grpc(server):
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        return client.is_model_ready("m")


def test_the_model_is_ready_when_it_says_so(served):
    server, answer = served
    for code, ready in [("True", True), ("False", False), ("time.sleep(0.1) or True", True)]:
        answer(code)
        assert server.is_ready("m") is ready
        assert ready_over_grpc(server) is ready
    # The server is, and requests are executed.
    answer("False")
    assert server.is_ready()
    status, _, body = server.request("GET", "/v2/models/m/ready")
    assert (status, body) == (400, b'{"error":"Model version not ready"}')


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("False", "Model 'm_0' is not ready (user-defined check failed)."),
        ("1", "is_ready() must return a boolean value"),
        ("None", "is_ready() must return a boolean value"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_why_it_is_not_is_in_the_log(served, code, reason):
    server, answer = served
    answer(code)
    assert not server.is_ready("m")
    assert f"Model 'm' version 1 is not ready: {reason}\n" in server.log()
    answer("True")
    assert server.is_ready("m")


def test_it_is_asked_while_it_executes(served):
    server, _ = served
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        busy = threading.Thread(target=infer, args=(client, 3.0))
        busy.start()
        wait_until(lambda: server.metrics()[PENDING] == 1, "the request to be there", server)
        assert server.is_ready("m")
        assert ready_over_grpc(server)
        assert server.metrics()[PENDING] == 1, "it was answered only after execute"
        busy.join()


PENDING = 'nv_inference_pending_request_count{model="m",version="1"}'


def infer(client, seconds):
    tensor = tritonclient.grpc.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([seconds], np.float32))
    client.infer("m", [tensor])


def test_concurrent_readiness_checks_share_one_run(served):
    server, answer = served
    answer("time.sleep(1) or True")
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.is_ready("m"))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 20
    assert server.log().count("asked") < 5


def test_a_model_that_does_not_answer_is_not_ready(served):
    server, answer = served
    answer("time.sleep(8) or True")
    assert not server.is_ready("m")
    assert "Timed out waiting for user-defined is_ready() response" in server.log()
    # Who asks while that run goes on gets its answer, whatever another one would say.
    answer("False")
    assert server.is_ready("m")
    assert not server.is_ready("m")
    assert server.log().count("Timed out") == 1
    assert server.stop() == 0


def test_a_process_that_dies_while_it_is_asked(served):
    server, answer = served
    answer("time.sleep(60)")
    (stub,) = server.stubs()
    asker = threading.Thread(target=server.is_ready, args=("m",))
    asker.start()
    wait_until(lambda: "asked 1" in server.log(), "the question", server)
    os.kill(stub, signal.SIGKILL)
    asker.join()
    assert "Model 'm' version 1 is not ready: Stub process 'm_0' is not healthy." in server.log()
    answer("True")
    wait_until(lambda: server.is_ready("m"), "another process", server)


def test_a_model_without_it_has_no_thread_and_no_socket_for_it(tmp_path):
    write_model(tmp_path, "m", MODEL.format(is_ready="pass"))
    with running_server(tmp_path) as server:
        assert server.is_ready("m")
        (stub,) = server.stubs()
        without = held(stub)
    write_model(tmp_path, "m", MODEL.format(is_ready=SYNC.strip()))
    (tmp_path / "m" / "answer").write_text("True")
    with running_server(tmp_path) as server:
        assert server.is_ready("m")
        (stub,) = server.stubs()
        # While the model answers, it has a file open.
        more = {what: count + 1 for what, count in without.items()}
        wait_until(lambda: held(stub) == more, "one thread and one socket more", server)


def held(pid):
    """Return the numbers of threads and descriptors of a process."""
    return {what: len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("task", "fd")}


def test_an_ensemble_is_ready_when_its_members_are(served, tmp_path):
    (tmp_path / "e" / "1").mkdir(parents=True)
    tensor = "data_type: TYPE_FP32 dims: [-1]"
    (tmp_path / "e" / "config.pbtxt").write_text(
        f'platform: "ensemble"\ninput [{{ name: "IN" {tensor} }}]\noutput [{{ name: "OUT" {tensor} }}]\n'
        'ensemble_scheduling { step [{ model_name: "m" model_version: -1\n'
        'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }] }\n'
    )
    _, answer = served
    with running_server(tmp_path) as server:
        assert server.is_ready("e")
        answer("False")
        assert not server.is_ready("e")
