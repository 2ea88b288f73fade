"""Iterative sequences: requests that their model gets again and again until it is done with them."""

import concurrent.futures
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.process.server import running_server, wait_until, write_model

# Runs IN times. OUT is the number of runs, times 100 the batch size of the last, times 10000 whether
# every run had the inputs and flags that it should have.
COUNTER = """
import numpy as np
import os
import time
import triton_python_backend_utils as pb_utils

AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.runs = {}
        self.good = {}
        self.senders = []

    def execute(self, requests):
        answers = [self.answer(request, len(requests)) for request in requests]
        return None if DECOUPLED else answers

    def answer(self, request, size):
        get = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        key = request.correlation_id()
        value = get("IN").item()
        get("IN")[...] = -1
        runs = self.runs[key] = self.runs.get(key, 0) + 1
        good = request.flags() & 1 == (runs == 1) and get("START").item() == (runs == 1)
        good = good and get("CORRID").item() == key
        self.good[key] = self.good.get(key, True) and good
        code = value - int(value)
        if code == 0.25 and runs == 2:
            # The sequence is over, and the server may give its number to another one.
            del self.runs[key], self.good[key]
            raise ValueError("the second run")
        if code == 0.5 and runs == 2:
            os.kill(os.getpid(), 9)
        if code == 0.75:
            print("RUN", runs, request.is_cancelled(), flush=True)
        again = runs < int(value)
        out = np.full(OUT_SHAPE, runs + 100 * size + 10000 * self.good[key], np.float32)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
        if again:
            request.set_release_flags(AGAIN)
        else:
            del self.runs[key], self.good[key]
        if DECOUPLED:
            sender = request.get_response_sender()
            sender.send(response, FINAL if not again else 0)
            if code == 0.125:
                try:
                    self.senders[-1].send(response)
                except (IndexError, pb_utils.TritonModelException) as error:
                    print("OLD SENDER", error, flush=True)
                self.senders.append(sender)
            return None
        if again and code == 0.625:
            return response
        return None if again else response
"""

NOT_ITERATIVE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [None]
"""

COROUTINE = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = {}

    async def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            runs = self.runs[key] = self.runs.get(key, 0) + 1
            await asyncio.sleep(0)
            last = runs == 3
            if not last:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            tensor = pb_utils.Tensor("OUT", np.full((1, 1), runs, np.float32))
            request.get_response_sender().send(pb_utils.InferenceResponse([tensor]), int(last))
"""

CONTROLS = """
control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }]
control_input [{ name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }]
"""
ONE = "IN FP32 [1] > OUT FP32 [1]"
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def batching(strategy, size=4, more="iterative_sequence: true"):
    return (
        f"max_batch_size: {size}\nsequence_batching {{ max_sequence_idle_microseconds: 60000000\n"
        f"{strategy}\n{CONTROLS}\n{more} }}"
    )


def source(decoupled, shape=(1, 1)):
    return f"DECOUPLED = {decoupled}\nOUT_SHAPE = {shape}\n{COUNTER}"


@pytest.fixture(scope="module")
def server(repository):
    oldest = "oldest { max_candidate_sequences: 4 }"
    ordered = "oldest { max_candidate_sequences: 4 preserve_ordering: true }"
    for name, strategy in (("direct", "direct { }"), ("oldest", oldest), ("ordered", ordered)):
        write_model(repository, name, source(False), config=batching(strategy), tensors=ONE)
    write_model(repository, "plain", source(False, (1,)), config=batching(oldest, 0), tensors=ONE)
    write_model(repository, "many", source(True), config=DECOUPLED + batching(oldest), tensors=ONE)
    write_model(
        repository, "async", COROUTINE, config=DECOUPLED + batching("direct { }"), tensors=ONE
    )
    write_model(repository, "never", NOT_ITERATIVE, config=batching(oldest, 4, ""), tensors=ONE)
    write_model(repository, "alone", NOT_ITERATIVE, tensors=ONE)
    with running_server(repository) as running:
        yield running


def ask(server, model, value, shape=(1, 1), timeout=None, **parameters):
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": shape, "data": [value]}],
        "parameters": parameters,
    }
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    answer = json.loads(answer)
    return answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def stream(server, model, value):
    """Send one request over a stream; returns the values of its responses."""
    answers = queue.Queue()
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [tensor])
        values = []
        while True:
            result, error = answers.get(timeout=150)
            if error is not None:
                return [*values, str(error)]
            values.append(result.as_numpy("OUT").item())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return values


@pytest.mark.parametrize("model", ["direct", "oldest", "ordered"])
def test_a_request_runs_until_its_model_is_done(server, model):
    assert ask(server, model, 3) == 10103
    assert ask(server, model, 3, sequence_id=7, sequence_start=True) == 10103
    # It was over with its response.
    assert "must specify the START flag" in ask(server, model, 3, sequence_id=7)


def test_a_model_without_batch_dimension(server):
    assert ask(server, "plain", 5, (1,)) == 10105


@pytest.mark.parametrize("model", ["direct", "oldest", "ordered"])
def test_requests_that_come_later_join_the_batch(server, model):
    numbers = [40, 41, 42, 43, 3, 4, 5, 6]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(server, model, number), numbers))
    assert [int(answer % 100) for answer in answers] == numbers
    assert all(answer >= 10000 for answer in answers)


def test_each_run_counts(server):
    def counts():
        stats = server.statistics("plain")
        return stats["inference_count"], stats["inference_stats"]["success"]["count"]

    before = counts()
    ask(server, "plain", 4, (1,))
    assert [after - old for after, old in zip(counts(), before, strict=True)] == [4, 4]


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_a_run_that_raises_is_the_last(server, model):
    assert "ValueError: the second run" in ask(
        server, model, 4.25, sequence_id=9, sequence_start=True
    )
    assert "must specify the START flag" in ask(server, model, 4, sequence_id=9)


def test_a_rescheduled_request_has_no_response(server):
    assert (
        "message: Expected a None object in the execute function return list for reschduled "
        "request, found type '<class 'c_python_backend_utils.InferenceResponse'>'."
    ) in ask(server, "oldest", 2.625)


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_a_stub_that_dies_takes_it_along(server, model):
    assert "is not healthy" in ask(server, model, 4.5)
    wait_until(lambda: server.is_ready(model), "the model to be ready again", server)
    assert ask(server, model, 2) == 10102


def test_only_iterative_models_may(server):
    text = (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
        "configured to handle such a flag"
    )
    assert text in ask(server, "never", 1, sequence_id=3, sequence_start=True)
    assert text in ask(server, "alone", 1, (1,))


def test_each_run_may_send_responses(server):
    assert stream(server, "many", 3) == [10101, 10102, 10103]
    assert stream(server, "async", 1) == [1, 2, 3]


def test_many_more_responses_than_may_wait(server):
    assert [int(value % 100) for value in stream(server, "many", 90)] == list(range(1, 91))
    assert len(stream(server, "many", 300)) == 300


def test_the_sender_of_a_run_ends_with_it(server):
    assert stream(server, "many", 3.125) == [10101, 10102, 10103]
    assert "OLD SENDER Unable to send response. Response sender has been closed." in server.log()


@pytest.mark.parametrize("model", ["direct", "many"])
def test_a_cancelled_request_is_not_rescheduled_for_ever(server, model):
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), 2000000.75, np.float32))
    before = server.log().count("RUN")
    client = triton.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: None)
    client.async_stream_infer(model, [tensor])
    wait_until(lambda: server.log().count("RUN") > before + 2, "it to run", server)
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_until(lambda: server.open_requests(model) == 0, "it to be over", server)
    assert ask(server, "direct", 2) == 10102 if model == "direct" else stream(server, model, 1)


def test_nothing_is_left_behind(server):
    quiet = server.metrics()
    assert {
        name: value for name, value in quiet.items() if "pending_request" in name and value
    } == {}
