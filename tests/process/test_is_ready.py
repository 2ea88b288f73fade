"""Readiness as a model reports it itself."""

import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from tests.process.controlled import EXPLICIT, control
from tests.process.ensembles import write_ensemble
from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_model

MODEL = """
import asyncio, fcntl, os, sys, threading, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        with open(self.folder + "/pid", "w") as file:
            file.write(str(os.getpid()))
        self.asked = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if x.flat[0]:
                fcntl.flock(open(self.folder + "/gate"), fcntl.LOCK_SH)
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
        await asyncio.sleep(0)
        return self.answer()
"""


@pytest.fixture(scope="module")
def both(repository):
    """A repository, and its server, which serves a model of each kind and loads what tests write."""
    for name, code in (("sync", SYNC), ("async", ASYNC)):
        write_answering(repository, name, code)
    with running_server(repository, *EXPLICIT, "--load-model=*") as server:
        yield repository, server


def write_answering(repository, name, code):
    directory = write_model(repository, name, MODEL.format(is_ready=code.strip()))
    (directory / "answer").write_text("True")


@pytest.fixture(params=["sync", "async"])
def served(request, both):
    """The server, the name of a model, and what sets its answers."""
    repository, server = both
    directory = repository / request.param

    def answer(code):
        (directory / "new").write_text(code)
        (directory / "new").rename(directory / "answer")

    yield server, request.param, answer
    answer("True")


def since(server):
    """Return what gives the log from now on."""
    begin = len(server.log())
    return lambda: server.log()[begin:]


def ready_over_grpc(server, name):
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        return client.is_model_ready(name)


def test_the_model_is_ready_when_it_says_so(served):
    server, name, answer = served
    for code, ready in [("True", True), ("False", False), ("os.sched_yield() or True", True)]:
        answer(code)
        assert server.is_ready(name) is ready
        assert ready_over_grpc(server, name) is ready
    # The server is, and requests are executed.
    answer("False")
    assert server.is_ready()
    status, _, body = server.request("GET", f"/v2/models/{name}/ready")
    assert (status, body) == (400, b'{"error":"Model version not ready"}')


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("False", "Model '{}_0' is not ready (user-defined check failed)."),
        ("1", "is_ready() must return a boolean value"),
        ("None", "is_ready() must return a boolean value"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_why_it_is_not_is_in_the_log(served, code, reason):
    server, name, answer = served
    log = since(server)
    answer(code)
    assert not server.is_ready(name)
    assert f"Model '{name}' version 1 is not ready: {reason.format(name)}\n" in log()
    answer("True")
    assert server.is_ready(name)


def test_it_is_asked_while_it_executes(served):
    server, name, _ = served
    gate = Gate(server.repositories[0] / name / "gate")
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        busy = threading.Thread(target=infer, args=(client, name))
        busy.start()
        wait_until(lambda: server.open_requests(name) == 1, "the request to be there", server)
        assert server.is_ready(name)
        assert ready_over_grpc(server, name)
        assert server.open_requests(name) == 1, "it was answered only after execute"
        gate.open()
        busy.join()


def infer(client, name):
    tensor = tritonclient.grpc.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    client.infer(name, [tensor])


def test_a_process_that_dies_while_it_is_asked(served):
    server, name, answer = served
    log = since(server)
    answer("print('process', os.getpid(), flush=True) or True")
    assert server.is_ready(name)
    wait_until(lambda: re.search(r"process \d+\n", log()), "the process", server)
    pid = int(re.search(r"process (\d+)\n", log())[1])
    log = since(server)
    answer("threading.Event().wait()")
    asker = threading.Thread(target=server.is_ready, args=(name,))
    asker.start()
    wait_until(lambda: "asked" in log(), "the question", server)
    os.kill(pid, signal.SIGKILL)
    asker.join()
    assert (
        f"Model '{name}' version 1 is not ready: Stub process '{name}_0' is not healthy." in log()
    )
    answer("True")
    wait_until(lambda: server.is_ready(name), "another process", server)


def test_a_model_without_it_has_no_thread_and_no_socket_for_it(both):
    repository, server = both
    stubs = []
    for name, code in (("without", "pass"), ("with", SYNC)):
        write_answering(repository, name, code)
        assert control(server, "load", name) == (200, "")
        assert server.is_ready(name)
        stubs.append(int((repository / name / "pid").read_text()))
    without, more = stubs
    # Either may have a file open for a moment, as while a model answers.
    wait_until(
        lambda: held(more) == {what: count + 1 for what, count in held(without).items()},
        "one thread and one socket more",
        server,
    )
    for name in ("without", "with"):
        assert control(server, "unload", name) == (200, "")


def held(pid):
    """Return the numbers of threads and descriptors of a process."""
    return {what: len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("task", "fd")}


def test_an_ensemble_is_ready_when_its_members_are(served, both):
    server, name, answer = served
    repository, _ = both
    ensemble = f"of_{name}"
    write_ensemble(repository, ensemble, f"{name} IN=A > OUT=B")
    assert control(server, "load", ensemble) == (200, "")
    assert server.is_ready(ensemble)
    answer("False")
    assert not server.is_ready(ensemble)
