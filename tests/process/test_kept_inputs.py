"""A model may keep its inputs for ever, or edit them: they stay what they were, and the server whole."""

import http.client
import json
import struct
from contextlib import ExitStack

import numpy as np
import pytest

from tests.process.raw_http import binary_request, connected, inference, read_answer
from tests.process.server import running_server, wait_until, write_code_model, write_model
from tests.process.streams import Stream

triton = pytest.importorskip("tritonclient.grpc")

KEEPER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            self.kept.append(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            changed = 0
            if len(self.kept) % 500 == 0:
                changed = sum(int(array[0] != i) for i, array in enumerate(self.kept))
            out = np.array([len(self.kept), changed], dtype=np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""
AT_ONCE = 64  # requests that a stream has at a model
REQUESTS = 5000  # more than there are tickets for memory that is lent to a stub


def test_a_model_that_keeps_every_input_gets_copies_in_time(tmp_path):
    write_model(tmp_path, "keeper", KEEPER)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "shape": [2],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 8},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    fields = {"Inference-Header-Content-Length": str(len(header))}
    with running_server(tmp_path) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=150)
        for i in range(REQUESTS):
            body = header + struct.pack("<2f", i, i)
            connection.request("POST", "/v2/models/keeper/infer", body, fields)
            answer = connection.getresponse().read()
            assert struct.unpack("<2f", answer[-8:]) == (i + 1, 0)
        connection.close()
        assert server.log().count("it gets copies from now on") == 1


INPUTLESS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        counts = [np.array([len(request.inputs())], dtype=np.float32) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]) for count in counts]
"""


def test_requests_without_inputs_keep_no_memory(tmp_path):
    optional = 'name: "IN" data_type: TYPE_FP32 dims: [-1] optional: true'
    write_model(tmp_path, "inputless", INPUTLESS, inputs=optional)
    with running_server(tmp_path) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=150)
        for _ in range(REQUESTS):
            connection.request("POST", "/v2/models/inputless/infer", b'{"inputs": []}')
            answer = json.loads(connection.getresponse().read())
            assert answer["outputs"][0]["data"] == [0]
        connection.close()


HOLDER = """
import os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.senders = []
        path = os.path.join(args["model_repository"], "go")
        threading.Thread(target=self.finish, args=(path,), daemon=True).start()

    def execute(self, requests):
        self.senders += [request.get_response_sender() for request in requests]

    def finish(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        while True:
            while self.senders:
                out = pb_utils.Tensor("OUT", np.array([len(self.senders)], np.float32))
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                self.senders.pop().send(pb_utils.InferenceResponse([out]), final)
            time.sleep(0.01)
"""


@pytest.mark.parametrize("scheduling", ["", "max_batch_size: 64\ndynamic_batching {}"])
@pytest.mark.parametrize("pure", ["", "1"])
def test_requests_wait_for_a_model_that_does_not_finish_others(tmp_path, scheduling, pure):
    config = f"model_transaction_policy {{ decoupled: true }}\n{scheduling}"
    directory = write_model(tmp_path, "holder", HOLDER, config=config)
    write_code_model(tmp_path)
    tensor = triton.InferInput("IN", [1, 2] if scheduling else [2], "FP32")
    tensor.set_data_from_numpy(np.zeros(tensor.shape(), np.float32))
    with running_server(tmp_path, environment={"GPUBRIDGE_NO_NATIVE": pure}) as server:
        with ExitStack() as stack:
            streams = [stack.enter_context(Stream(server)) for _ in range(66)]
            for stream in streams * AT_ONCE:
                stream.client.async_stream_infer("holder", [tensor])
            told = "requests wait: model instance 'holder_0'"
            wait_until(lambda: told in server.log(), told, server)
            # Other models do not wait.
            assert server.ask("self.said = 1")[1] == "1"
            (directory / "go").touch()
            for stream in streams * AT_ONCE:
                _, error = stream.answers.get(timeout=60)
                assert error is None
        assert server.log().count("requests wait") == 1


def test_a_kept_request_is_over(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        assert server.ask("self.kept = request; self.said = request.is_cancelled()")[1] == "False"
        assert server.ask("self.said = self.kept.is_cancelled()")[1] == "False"
        # The place where its output went may be another request's by now.
        status, error = server.ask("self.kept.output('OUT', (1,), np.float32)")
        assert status == 500
        assert "expected a request that is not answered yet" in error


VIEWER = """
import gc
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if len(self.kept) < 5:
                # A view of a view: the tensor and its array are gone, the memory must not be.
                self.kept.append((int(x[0]), x.reshape(-1, 2)[:, 1]))
            whole = [bool((view == first).all()) for first, view in self.kept]
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([len(whole), sum(whole)], dtype=np.int64))]))
        gc.collect()
        return responses
"""

EDITOR = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            x *= 2
            x[0] = -1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
        return responses
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(
        repository,
        "viewer",
        VIEWER,
        inputs='name: "IN" data_type: TYPE_INT64 dims: [-1]',
        outputs='name: "OUT" data_type: TYPE_INT64 dims: [-1]',
    )
    write_model(repository, "editor", EDITOR)
    with running_server(repository) as server:
        yield server


@pytest.mark.parametrize("size", [1 << 10, 1 << 15])
def test_inputs_that_a_model_keeps_stay_whole(server, size):
    with connected(server.http_url) as sock:
        for number in range(40):
            field, body = binary_request(
                [("IN", "INT64", [size], np.full(size, number, np.int64).tobytes())]
            )
            sock.sendall(inference("viewer", body, field))
            status, fields, answer = read_answer(sock)
            assert status == 200
            kept, whole = np.frombuffer(
                answer[int(fields["Inference-Header-Content-Length"]) :], np.int64
            )
            assert kept == whole


def test_an_input_may_be_edited_in_place(server):
    for size in (4, 100_000):
        array = np.arange(1, size + 1, dtype=np.float32)
        expected = 2 * array
        expected[0] = -1
        field, body = binary_request([("IN", "FP32", [size], array.tobytes())])
        with connected(server.http_url) as sock:
            for _ in range(3):
                sock.sendall(inference("editor", body, field))
                status, fields, answer = read_answer(sock)
                assert status == 200
                got = np.frombuffer(
                    answer[int(fields["Inference-Header-Content-Length"]) :], np.float32
                )
                np.testing.assert_array_equal(got, expected)
