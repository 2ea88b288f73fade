"""Outputs that lie in their request's own input: not copied, unless they may still be written to."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from tritonclient import grpc

from tests.process.server import running_server, write_model

LARGE = 1 << 18
LIMIT = 48 << 20

# What CASE says is done with X: the outputs are A and, where there is one, B.
MODEL = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

def tensor(name, array):
    return pb_utils.Tensor(name, array)

class TritonPythonModel:
    kept, go_on = [], threading.Event()

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answer(request)) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X")
        case = pb_utils.get_input_tensor_by_name(request, "CASE").as_numpy()[0].decode()
        small = tensor("B", np.array([7], np.float32))
        for earlier in self.kept:
            earlier += 1
        if case == "through":
            return [tensor("A", x.as_numpy()), small]
        if case == "renamed":
            return [pb_utils.Tensor.from_dlpack("A", x.to_dlpack()), small]
        if case == "piece":
            return [tensor("A", x.as_numpy()[5 : 5 + (1 << 17)]), small]
        if case == "edited":
            array = x.as_numpy()
            array *= 2
            return [tensor("A", array), small]
        if case == "two pieces":
            array = x.as_numpy()
            return [tensor("A", array[: 1 << 17]), tensor("B", array[1 << 17 :])]
        if case == "twice":
            return [tensor("A", x.as_numpy()), tensor("B", x.as_numpy())]
        if case == "kept":
            self.kept.append(x.as_numpy())
            return [tensor("A", x.as_numpy()), small]
        if case == "kept response":
            answer = [tensor("A", x.as_numpy()), small]
            self.kept_response = answer
            self.kept.append(answer[0].as_numpy()[:10])
            return answer
        if case == "thread":
            array, self.go_on = x.as_numpy(), threading.Event()
            self.thread = threading.Thread(target=lambda: (self.go_on.wait(), array.sum()))
            self.thread.start()
            return [tensor("A", array), small]
        if case == "forget":
            self.kept.clear()
            self.go_on.set()
            return [tensor("A", x.as_numpy() + 1), small]
"""

# Edits what it gets, where it may.
EDIT = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            if array.flags.writeable:
                array += 1
            else:
                array = array + 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return responses
"""
THROUGH = EDIT.replace("array += 1", "pass").replace("array = array + 1", "pass")
VECTOR = 'name: "OUT" data_type: TYPE_FP32 dims: [-1]'


def step(model, given, made):
    return (
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "IN" value: "{given}" }} '
        f'output_map {{ key: "OUT" value: "{made}" }} }}'
    )


def write_ensemble(repository, name, steps, outputs):
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    made = ", ".join(
        f'{{ name: "{output}" data_type: TYPE_FP32 dims: [-1] }}' for output in outputs
    )
    (folder / "config.pbtxt").write_text(
        f'name: "{name}"\nplatform: "ensemble"\nmax_batch_size: 0\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [-1] } ]\n'
        f"output [ {made} ]\nensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n"
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(
        repository,
        "m",
        MODEL,
        inputs='name: "X" data_type: TYPE_FP32 dims: [-1] }, '
        '{ name: "CASE" data_type: TYPE_STRING dims: [1]',
        outputs='name: "A" data_type: TYPE_FP32 dims: [-1] }, '
        '{ name: "B" data_type: TYPE_FP32 dims: [-1]',
    )
    for name, code in (("through", THROUGH), ("edit", EDIT)):
        write_model(
            repository,
            name,
            code,
            inputs='name: "IN" data_type: TYPE_FP32 dims: [-1]',
            outputs=VECTOR,
        )
    chain = [step("through", "X", "p"), step("edit", "p", "Y")]
    write_ensemble(repository, "chain", chain, ["Y"])
    # The input has two readers, one of which lets it through to one that writes.
    fork = [step("through", "X", "p"), step("edit", "p", "Y"), step("through", "X", "Z")]
    write_ensemble(repository, "fork", fork, ["Y", "Z"])
    with running_server(repository, "--request-arena-limit", str(LIMIT)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


def copied(server, model="m"):
    labels = f'{{kind="host",model="{model}",version="1"}}'
    return server.metrics()["gpubridge_copied_bytes_total" + labels]


def given(values):
    x = grpc.InferInput("X", [values.size], "FP32")
    x.set_data_from_numpy(values)
    return x


def ask(client, case, values):
    told = grpc.InferInput("CASE", [1], "BYTES")
    told.set_data_from_numpy(np.array([case.encode()], object))
    answer = client.infer("m", [given(values), told])
    return answer.as_numpy("A"), answer.as_numpy("B")


VALUES = np.arange(LARGE, dtype=np.float32)
OTHER_BYTES = 1 << 18
"""Bytes that may be copied besides: small inputs and outputs, and the beginning of a message."""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("through", VALUES, [7]),
        ("renamed", VALUES, [7]),
        ("piece", VALUES[5 : 5 + (1 << 17)], [7]),
        ("edited", VALUES * 2, [7]),
        ("two pieces", VALUES[: 1 << 17], VALUES[1 << 17 :]),
    ],
)
def test_outputs_in_the_input_are_sent_from_there(server, client, case, first, second):
    before = copied(server)
    a, b = ask(client, case, VALUES)
    assert np.array_equal(a, first)
    assert np.array_equal(b, second)
    assert copied(server) - before < OTHER_BYTES


@pytest.mark.parametrize("case", ["twice", "kept", "kept response", "thread"])
def test_memory_that_others_may_write_to_is_copied(server, client, case):
    before = copied(server)
    a, _ = ask(client, case, VALUES)
    assert np.array_equal(a, VALUES)
    assert copied(server) - before >= VALUES.nbytes
    ask(client, "forget", VALUES)


def test_a_kept_input_that_is_edited_later_changes_no_answer_on_its_way(client):
    """Each call edits what earlier ones kept, while their answers may still be on their way."""
    answers = queue.SimpleQueue()
    for _ in range(16):
        told = grpc.InferInput("CASE", [1], "BYTES")
        told.set_data_from_numpy(np.array([b"kept"], object))
        client.async_infer(
            "m", [given(VALUES), told], lambda result, error: answers.put((result, error))
        )
    for _ in range(16):
        result, error = answers.get(timeout=120)
        assert error is None
        assert np.array_equal(result.as_numpy("A"), VALUES)
    ask(client, "forget", VALUES)


def test_the_next_member_gets_it_and_may_write_to_it(server, client):
    before = copied(server, "through")
    answer = client.infer("chain", [given(VALUES)])
    assert np.array_equal(answer.as_numpy("Y"), VALUES + 1)
    assert copied(server, "through") - before < OTHER_BYTES


def test_an_input_of_two_members_is_written_by_neither(client):
    for _ in range(5):
        answer = client.infer("fork", [given(VALUES)])
        assert np.array_equal(answer.as_numpy("Y"), VALUES + 1)
        assert np.array_equal(answer.as_numpy("Z"), VALUES)


def test_the_memory_comes_back(client):
    for _ in range(LIMIT // VALUES.nbytes + 8):
        a, _ = ask(client, "through", VALUES)
    assert np.array_equal(a, VALUES)
