"""A model may keep its inputs for ever, or edit them: they stay what they were, and the server whole."""

import re
import struct
from contextlib import ExitStack

import numpy as np
import pytest

from tests.process.gates import Gate
from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, connected, inference, read_answer, read_answers
from tests.process.server import (
    PURE,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)
from tests.process.streams import Stream

triton = pytest.importorskip("tritonclient.grpc")

KEEPER = answering(
    """
self.kept.append(value)
changed = 0
if len(self.kept) % 500 == 0:
    changed = sum(int(array[0] != i) for i, array in enumerate(self.kept))
return respond(OUT=np.array([len(self.kept), changed], dtype=np.float32))
""",
    "self.kept = []",
)
VIEWER = answering(
    """
import gc
if len(self.kept) < 5:
    # A view of a view: the tensor and its array are gone, the memory must not be.
    self.kept.append((int(value[0]), value.reshape(-1, 2)[:, 1]))
whole = [bool((view == first).all()) for first, view in self.kept]
gc.collect()
return respond(OUT=np.array([len(whole), sum(whole)], dtype=np.int64))
""",
    "self.kept = []",
)
EDITOR = answering("value *= 2; value[0] = -1; return respond(OUT=value)")
AT_ONCE = 64  # requests that a stream, or a connection, has at a model at once
REQUESTS = 5000  # more than the inputs that a model may keep before it gets copies


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "viewer", VIEWER, tensors="IN INT64 [-1] > OUT INT64 [-1]")
    write_model(repository, "editor", EDITOR)
    write_model(repository, "keeper", KEEPER)
    write_code_model(repository)
    with running_server(repository) as server:
        yield server


def answers(server, request):
    """Yield the body of the answer to each request, which ``request`` makes of its number."""
    with connected(server.http_url) as sock:
        for first in range(0, REQUESTS, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, REQUESTS))
            sock.sendall(b"".join(map(request, numbers)))
            for status, body in read_answers(sock, len(numbers)):
                assert status == 200
                yield body


def test_a_model_that_keeps_every_input_gets_copies_in_time(server):
    def request(number):
        field, body = binary_request([("IN", "FP32", [2], struct.pack("<2f", number, number))])
        return inference("keeper", body, field)

    for number, answer in enumerate(answers(server, request)):
        assert struct.unpack("<2f", answer[-8:]) == (number + 1, 0)
    told = re.findall("'keeper.* it gets copies from now on", server.log())
    assert len(told) == 1
    counted = 'gpubridge_fallbacks_total{model="keeper",reason="inputs_kept",version="1"}'
    assert server.metrics()[counted] == 1


HOLDER = """
import queue, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.senders = queue.SimpleQueue()
        threading.Thread(target=self.finish, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            self.senders.put(request.get_response_sender())

    def finish(self):
        WAIT
        while True:
            out = pb_utils.Tensor("OUT", np.zeros((1, 1), np.float32)[SHAPE])
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self.senders.get().send(pb_utils.InferenceResponse([out]), final)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
BATCHED = "max_batch_size: 64\ndynamic_batching {}"


# By the compiled loop, without batches: tests/process/test_decoupled.py
@pytest.mark.parametrize(
    ("environment", "config"),
    [
        pytest.param({}, BATCHED, marks=pytest.mark.nightly, id="compiled-batched"),
        pytest.param(PURE, "", id="python"),
    ],
)
def test_a_model_gets_thousands_of_requests_before_it_finishes_one(tmp_path, config, environment):
    gate = Gate(tmp_path / "gate")
    source = HOLDER.replace("WAIT", gate.wait).replace("SHAPE", ":" if config else "0")
    write_model(tmp_path / "models", "holder", source, config=DECOUPLED + config)
    write_code_model(tmp_path / "models")
    tensor = triton.InferInput("IN", [1, 2] if config else [2], "FP32")
    tensor.set_data_from_numpy(np.zeros(tensor.shape(), np.float32))
    with running_server(tmp_path / "models", environment=environment) as server:
        with ExitStack() as stack:
            streams = [stack.enter_context(Stream(server)) for _ in range(66)]
            for stream in streams * AT_ONCE:
                stream.client.async_stream_infer("holder", [tensor])
            sent = len(streams) * AT_ONCE
            wait_until(lambda: server.open_requests("holder") == sent, "all requests", server)
            # Other models do not wait.
            assert server.ask("self.said = 1")[1] == "1"
            gate.open()
            for stream in streams * AT_ONCE:
                _, error = stream.answers.get(timeout=60)
                assert error is None
        assert server.open_requests("holder") == 0


def test_a_kept_request_is_over(server):
    assert server.ask("self.kept = request; self.said = request.is_cancelled()")[1] == "False"
    assert server.ask("self.said = self.kept.is_cancelled()")[1] == "False"
    # The place where its output went may be another request's by now.
    status, error = server.ask("self.kept.output('OUT', (1,), np.float32)")
    assert status == 500
    assert "expected a request that is not answered yet" in error


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
