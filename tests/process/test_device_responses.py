"""Responses of models on a GPU: several to a request, of every kind of tensor, from any thread."""

import sys

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.commands import run_command
from tests.process.device_models import (
    DOUBLE,
    LIBRARY,
    running_device_server,
    write_device_model,
)
from tests.process.gated_models import MAKER, Gate
from tests.process.streams import Stream
from tests.simcuda.machine import running_machine

COUNT = 20_000
NBYTES = 4 * COUNT
TIMES = 5

# Answers several times, from a thread: with the input, doubled again and again on the GPU.
REPEAT = (
    DOUBLE.replace(
        "return [self.answer(request) for request in requests]",
        """for request in requests:
            threading.Thread(target=self.send, args=[request]).start()""",
    )
    + """
    def send(self, request):
        # A thread of the model's own chooses its device itself.
        ok(d.cuCtxSetCurrent(self.context))
        library, sender = Library(), request.get_response_sender()
        values = request.inputs()[0].as_numpy()
        arrays = [library.array(key, values.shape) for key in ("one", "other")]
        first, second = (a.__cuda_array_interface__["data"][0] for a in arrays)
        ok(d.cuMemcpyHtoD(first, values.tobytes(), values.nbytes))
        for i in range(TIMES):
            library.double(first, second, values.size)
            first, second = second, first
            arrays.reverse()
            sender.send(pb_utils.InferenceResponse([
                pb_utils.Tensor.from_dlpack("OUT", arrays[0])]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
REPEAT = REPEAT.replace(
    "self.library = Library(args)",
    "self.library = Library(args); self.context = ok(d.cuCtxGetCurrent())",
)
REPEAT = REPEAT.replace("TIMES", str(TIMES)).replace("import ctypes,", "import threading, ctypes,")

# Answers with tensors of several kinds, some of them on the GPU.
MIXED = (
    LIBRARY
    + """

class TritonPythonModel:
    def initialize(self, args):
        self.library = Library(args)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = request.inputs()[0].as_numpy()
        halves = self.library.array("halves", values.shape, np.float16)
        pointer = halves.__cuda_array_interface__["data"][0]
        raw = values.astype(np.float16).tobytes()
        ok(d.cuMemcpyHtoDAsync(pointer, raw, len(raw), self.library.stream))
        brains = pb_utils.Tensor.empty("BF16", values.shape, "BF16", "cuda")
        flags = pb_utils.Tensor.empty("BOOL", [3], np.bool_, "cuda")
        for tensor, fill in ((brains, 0x3f), (flags, 1)):
            ok(d.cuMemsetD8Async(tensor._device_bytes.pointer, fill,
                                 tensor._device_bytes.nbytes, 1))
            tensor._device_bytes.hand_out(None)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("FP32", values), pb_utils.Tensor.from_dlpack("FP16", halves), brains,
            pb_utils.Tensor.empty("EMPTY", [0, 3], np.int32, "cuda"), flags,
            pb_utils.Tensor("TEXT", np.array([b"text"], np.object_))])
"""
)
# Answers each request from a thread, with what is made on a stream of its own.
THREADED = (
    MAKER.replace("import ctypes,", "import threading, ctypes,")
    + """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=[request]).start()

    def send(self, request):
        ok(d.cuCtxSetCurrent(self.context))
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([self.answer(request)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
KINDS = ("FP32", "FP16", "BF16", "INT32", "BOOL", "STRING")
NAMES = ("FP32", "FP16", "BF16", "EMPTY", "BOOL", "TEXT")
OUTPUTS = "; ".join(
    f"{name} {kind} [{'-1, -1' if name == 'EMPTY' else '-1'}]"
    for name, kind in zip(NAMES, KINDS, strict=True)
)


@pytest.fixture(scope="module")
def served(repository):
    decoupled = "model_transaction_policy { decoupled: true }"
    write_device_model(repository, "repeat", REPEAT, config=decoupled)
    write_device_model(repository, "threaded", THREADED, config=decoupled)
    write_device_model(repository, "mixed", MIXED, tensors=f"> {OUTPUTS}")
    with running_device_server(repository) as served:
        yield served


def test_each_response_of_a_decoupled_model_leaves_with_one_copy_and_one_wait(served):
    values = np.random.default_rng(3).random(COUNT, np.float32)
    given = grpcclient.InferInput("IN", [COUNT], "FP32").set_data_from_numpy(values)
    cost = {"d2h": (TIMES * NBYTES, TIMES), "waits": TIMES}
    with served.doing("repeat", **cost), Stream(served.server) as stream:
        stream.client.async_stream_infer("repeat", [given], enable_empty_final_response=True)
        answers = [stream.answers.get(timeout=30) for _ in range(TIMES + 1)]
    for i, (result, error) in enumerate(answers[:-1]):
        assert error is None
        assert (result.as_numpy("OUT") == 2 ** (i + 1) * values).all()


def test_an_answer_does_not_wait_for_the_kernel_of_another_request(served, repository):
    gate, many = Gate(repository, "threaded", served.server), 12
    values = [np.random.default_rng(i).random(COUNT, np.float32) for i in range(many + 1)]
    cost = {"d2h": ((many + 1) * NBYTES, many + 1), "waits": many + 1}
    with served.doing("threaded", **cost), Stream(served.server) as stream:

        def ask(values, name):
            given = grpcclient.InferInput("IN", [COUNT], "FP32").set_data_from_numpy(values)
            stream.client.async_stream_infer("threaded", [given], request_id=name)

        def answered(values):
            result, error = stream.answers.get(timeout=30)
            assert error is None
            assert (result.as_numpy("OUT") == 2 * values).all()

        gate.hold()
        try:
            ask(values[0], "slow")
            gate.wait_for("made")
            for each in values[1:]:
                ask(each, "quick")
                answered(each)
        finally:
            gate.open()
        answered(values[0])


def test_tensors_of_several_kinds_in_one_response_cost_one_wait(served):
    values = np.linspace(0, 1, COUNT, dtype=np.float32)
    with httpclient.InferenceServerClient(served.server.http_url) as client:
        given = httpclient.InferInput("IN", [COUNT], "FP32").set_data_from_numpy(values)
        with served.doing("mixed", d2h=(NBYTES + 3, 3), waits=1):
            result = client.infer("mixed", [given])
        assert (result.as_numpy("FP32") == values).all()
        assert (result.as_numpy("FP16") == values.astype(np.float16)).all()
        assert result.get_output("BF16")["shape"] == [COUNT]
        assert result.as_numpy("EMPTY").shape == (0, 3)
        assert result.as_numpy("BOOL").tolist() == [True] * 3
        assert result.as_numpy("TEXT").tolist() == [b"text"]


def test_a_model_on_a_gpu_that_runs_where_its_developer_is(tmp_path):
    directory = write_device_model(tmp_path, "double", DOUBLE)
    with running_machine() as machine:
        command = [sys.executable, "-m", "gpubridge", "run", str(directory), "--input", "IN=[1, 2]"]
        done = run_command(command, env=machine.environment())
        assert done.returncode == 0, done.stderr
        assert "[2., 4.]" in done.stdout, done.stdout
        assert machine.violations() == []
