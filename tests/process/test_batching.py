"""Schedulers at work: real requests, gathered, ordered, refused and kept together."""

import concurrent.futures

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.process.gates import Gate
from tests.process.server import running_server, wait_until, write_model

GATHERER = """
import fcntl, os
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        data = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        if max(d.max() for d in data):
            fcntl.flock(open(os.path.dirname(__file__) + "/gate"), fcntl.LOCK_SH)
        size = sum(len(d) for d in data)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(d.shape, size, np.float32))])
            for d in data
        ]
"""

COUNTER = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            get = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
            value, start, end, ready = get("IN"), get("START"), get("END"), get("READY")
            key = get("CORRID")
            if ready:
                self.sums[key] = (0 if start else self.sums[key]) + value
            out = self.sums.pop(key) if end else self.sums.get(key, -1)
            shape = (1, 1)
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", np.full(shape, out, np.float32)),
                     pb_utils.Tensor("SIZE", np.full(shape, len(requests), np.float32))]
                )
            )
        return responses
"""

CONTROLS = "".join(
    f'control_input [{{ name: "{name}" control [{{ kind: CONTROL_SEQUENCE_{name} {values} }}] }}]\n'
    for name, values in (
        ("START", "fp32_false_true: [0, 1]"),
        ("END", "bool_false_true: [false, true]"),
        ("READY", "int32_false_true: [0, 1]"),
        ("CORRID", "data_type: TYPE_UINT64"),
    )
)


@pytest.fixture(scope="module")
def server(repository):
    one = "IN FP32 [1] > OUT FP32 [1]"
    gather = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 300000 }"
    write_model(repository, "gather", GATHERER, config=gather, tensors=one)
    full = "max_batch_size: 1\ndynamic_batching { default_queue_policy { max_queue_size: 2 } }"
    write_model(repository, "full", GATHERER, config=full, tensors=one)
    two = f"{one}; SIZE FP32 [1]"
    for name, strategy in (
        ("direct", "direct { }"),
        ("oldest", "oldest { max_candidate_sequences: 4 }"),
    ):
        # Longer than any client here waits: no slot becomes free by time.
        config = "max_batch_size: 4\nsequence_batching { max_sequence_idle_microseconds: 600000000\n%s\n%s }"
        write_model(repository, name, COUNTER, config=config % (CONTROLS, strategy), tensors=two)
    with running_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def threads():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


def ask(server, model, value, size=1, **options):
    tensor = triton.InferInput("IN", [size, 1], "FP32")
    tensor.set_data_from_numpy(np.full((size, 1), value, np.float32))
    with triton.InferenceServerClient(server.http_url, network_timeout=150) as client:
        result = client.infer(model, [tensor], **options)
    return [result.as_numpy(name) for name in ("OUT", "SIZE")]


def test_requests_that_come_together_are_one_batch(server, threads):
    answers = list(threads.map(lambda size: ask(server, "gather", 0, size)[0], [1, 2, 5]))
    assert [answer.tolist() for answer in answers] == [[[8.0]] * 1, [[8.0]] * 2, [[8.0]] * 5]
    figures = server.statistics("gather")
    assert (figures["execution_count"], figures["inference_count"]) == (1, 8)
    assert [entry["batch_size"] for entry in figures["batch_stats"]] == [8]


def test_a_batch_that_is_not_full_goes_when_its_delay_is_over(server, threads):
    # Nothing else happens meanwhile: only the timer can send it.
    answers = list(threads.map(lambda size: ask(server, "gather", 0, size)[0].max(), [1, 2]))
    assert answers == [3.0, 3.0]


def test_a_full_queue_refuses(server, threads):
    gate = Gate(server.repositories[0] / "full" / "1" / "gate")
    busy = [threads.submit(ask, server, "full", 1.0) for _ in range(3)]
    wait_until(lambda: server.open_requests("full") == 3, "the queue to be full", server)
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as caught:
        ask(server, "full", 0)
    assert caught.value.status() == "503"
    gate.open()
    assert [task.result()[0].item() for task in busy] == [1.0] * 3
    refused = 'nv_inference_request_failure{model="full",reason="REJECTED",version="1"}'
    assert server.metrics()[refused] == 1


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_sequences_keep_their_state_and_their_order(server, threads, model):
    def count(number):
        sums = []
        for step in range(5):
            out, size = ask(
                server,
                model,
                number,
                sequence_id=number,
                sequence_start=step == 0,
                sequence_end=step == 4,
            )
            assert 1 <= size.item() <= 4
            sums.append(out.item())
        return sums

    # More than there are slots: some wait until others have ended.
    answers = list(threads.map(count, range(1, 11)))
    assert answers == [[number * step for step in range(1, 6)] for number in range(1, 11)]
