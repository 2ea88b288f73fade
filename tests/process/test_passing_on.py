"""Outputs that lie in their request's own input: not copied, unless they may still be written to."""

import queue

import numpy as np
import pytest
from tritonclient import grpc

from tests.process.ensembles import write_ensemble
from tests.process.model_sources import answering
from tests.process.server import LITTLE_MEMORY, running_server, write_model

LARGE = 1 << 18
LIMIT = 24 << 20

# Runs the code in CASE, which makes the output A, and may make B, of X.
MODEL = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    kept, go_on = [], threading.Event()

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answer(request)) for request in requests]

    def answer(self, request):
        x, case = request.inputs()
        for earlier in self.kept:
            earlier += 1
        made = {**globals(), "self": self, "x": x, "b": np.array([7], np.float32)}
        exec(case.as_numpy()[0].decode(), made)
        tensors = [(name, made[name.lower()]) for name in "AB"]
        return [t if hasattr(t, "as_numpy") else pb_utils.Tensor(name, t) for name, t in tensors]
"""
THROUGH = "a = x.as_numpy()"
KEPT = "a = x.as_numpy(); self.kept.append(x.as_numpy())"
KEPT_RESPONSE = """
a = pb_utils.Tensor("A", x.as_numpy())
self.kept_response = [a]
self.kept.append(a.as_numpy()[:10])
"""
THREAD = """
a, go_on = x.as_numpy(), threading.Event()
self.go_on = go_on
self.thread = threading.Thread(target=lambda: (go_on.wait(), a.sum()))
self.thread.start()
"""
FORGET = "self.kept.clear(); self.go_on.set(); a = x.as_numpy() + 1"
# Edits what it gets, where it may.
EDIT = answering(
    """
if value.flags.writeable:
    value += 1
else:
    value = value + 1
return respond(OUT=value)
"""
)


@pytest.fixture(scope="module")
def server(repository):
    tensors = "X FP32 [-1]; CASE STRING [1] > A FP32 [-1]; B FP32 [-1]"
    write_model(repository, "m", MODEL, tensors=tensors)
    write_model(repository, "through", answering("return respond(OUT=value)"))
    write_model(repository, "edit", EDIT)
    chain = "through IN=X > OUT=p", "edit IN=p > OUT=Y"
    write_ensemble(repository, "chain", *chain, inputs="X", outputs="Y")
    # The input has two readers, one of which lets it through to one that writes.
    fork = *chain, "through IN=X > OUT=Z"
    write_ensemble(repository, "fork", *fork, inputs="X", outputs="Y Z")
    with running_server(repository, *LITTLE_MEMORY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


def given(values):
    return grpc.InferInput("X", [values.size], "FP32").set_data_from_numpy(values)


def asked(case, values):
    told = grpc.InferInput("CASE", [1], "BYTES")
    told.set_data_from_numpy(np.array([case.encode()], object))
    return [given(values), told]


def ask(client, case, values):
    answer = client.infer("m", asked(case, values))
    return answer.as_numpy("A"), answer.as_numpy("B")


VALUES = np.arange(LARGE, dtype=np.float32)
OTHER_BYTES = 1 << 18
"""Bytes that may be copied besides: small inputs and outputs, and the beginning of a message."""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (THROUGH, VALUES, [7]),
        ("a = pb_utils.Tensor.from_dlpack('A', x.to_dlpack())", VALUES, [7]),
        (f"{THROUGH}[5 : 5 + (1 << 17)]", VALUES[5 : 5 + (1 << 17)], [7]),
        (f"{THROUGH}; a *= 2", VALUES * 2, [7]),
        (
            "array = x.as_numpy(); a, b = array[: 1 << 17], array[1 << 17 :]",
            VALUES[: 1 << 17],
            VALUES[1 << 17 :],
        ),
    ],
)
def test_outputs_in_the_input_are_sent_from_there(server, client, case, first, second):
    before = server.copied("m")
    a, b = ask(client, case, VALUES)
    assert np.array_equal(a, first)
    assert np.array_equal(b, second)
    assert server.copied("m") - before < OTHER_BYTES


@pytest.mark.parametrize("case", ["a, b = x.as_numpy(), x.as_numpy()", KEPT, KEPT_RESPONSE, THREAD])
def test_memory_that_others_may_write_to_is_copied(server, client, case):
    before = server.copied("m")
    a, _ = ask(client, case, VALUES)
    assert np.array_equal(a, VALUES)
    assert server.copied("m") - before >= VALUES.nbytes
    ask(client, FORGET, VALUES)


def test_a_kept_input_that_is_edited_later_changes_no_answer_on_its_way(client):
    """Each call edits what earlier ones kept, while their answers may still be on their way."""
    answers = queue.SimpleQueue()
    for _ in range(16):
        client.async_infer(
            "m", asked(KEPT, VALUES), lambda result, error: answers.put((result, error))
        )
    for _ in range(16):
        result, error = answers.get(timeout=120)
        assert error is None
        assert np.array_equal(result.as_numpy("A"), VALUES)
    ask(client, FORGET, VALUES)


def test_the_next_member_gets_it_and_may_write_to_it(server, client):
    before = server.copied("through")
    answer = client.infer("chain", [given(VALUES)])
    assert np.array_equal(answer.as_numpy("Y"), VALUES + 1)
    assert server.copied("through") - before < OTHER_BYTES


def test_an_input_of_two_members_is_written_by_neither(client):
    for _ in range(5):
        answer = client.infer("fork", [given(VALUES)])
        assert np.array_equal(answer.as_numpy("Y"), VALUES + 1)
        assert np.array_equal(answer.as_numpy("Z"), VALUES)


def test_the_memory_comes_back(client):
    for _ in range(LIMIT // VALUES.nbytes + 8):
        a, _ = ask(client, THROUGH, VALUES)
    assert np.array_equal(a, VALUES)
