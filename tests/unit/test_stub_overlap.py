"""Coroutines of a plain model's execute that run beside each other: each answers its own requests."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import gpubridge
from gpubridge.one_file.declare import declaration_of
from gpubridge.stub.coroutine_answers import CoroutineAnswers
from gpubridge.stub.coroutines import Coroutines
from tests.unit.looped_stub import started_stubs

MODEL = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.float32))])

class TritonPythonModel:
    def initialize(self, args):
        self.others = asyncio.Event()
    async def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(each, "IN").as_numpy() for each in requests]
        values = [float(each[0, 0]) for each in inputs]
        if values[0] == 9:
            self.others.set()
        await self.others.wait()
        {body}
        return [answer(value) for value in values]
"""


@pytest.fixture(params=["native", "python"])
def start(request, tmp_path):
    yield from started_stubs(request.param, tmp_path)


def begun(stub, *batches):
    """Send batches of requests of a number each, with tickets in their order."""
    numbers = iter(range(8))
    stub.send(
        *[[stub.record(next(numbers), np.array([[n]], np.float32)) for n in b] for b in batches]
    )


@pytest.mark.parametrize("most", [3, 8])
def test_requests_wait_for_later_ones(start, most):
    stub = start(model=MODEL.format(body="pass"), coroutines=most)
    begun(stub, [1, 2], [3], [9])
    assert [stub.array(each).tolist() for each in stub.answers(*range(4))] == [
        [[1]],
        [[2]],
        [[3]],
        [[9]],
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("assert values != [1, 2], 'no'", "AssertionError: no"),
        ("if values == [1, 2]: values.pop()", "Number of InferenceResponse objects do not match"),
        ("if values == [1, 2]: return None", "Expected a list in the execute return"),
        ("if values == [1, 2]: return 5", "found type '<class 'int'>'"),
    ],
)
def test_what_goes_wrong_in_one_is_the_answer_of_its_requests(start, body, said):
    stub = start(model=MODEL.format(body=body), coroutines=8)
    begun(stub, [1, 2], [9])
    *failed, fine = stub.answers(0, 1, 2)
    assert all(said in stub.error(each) for each in failed)
    assert stub.array(fine).tolist() == [[9]]


def test_a_sender_answers_in_place_of_the_coroutine(start):
    body = "requests[0].get_response_sender().send(answer(7), 1); return [None] * len(requests)"
    stub = start(model=MODEL.format(body=body), coroutines=8)
    begun(stub, [1], [9])
    assert [stub.array(each).tolist() for each in stub.answers(0, 1)] == [[[7]], [[7]]]


def test_one_that_is_one_too_many_waits_for_a_place():
    coroutines = Coroutines()
    identity = SimpleNamespace(
        decoupled=False, coroutines=2, instance="m", known=lambda error: error
    )
    answers = CoroutineAnswers(identity, None, coroutines, lambda error: None)
    ends = []

    async def until_told():
        ends.append(asyncio.Event())
        await ends[-1].wait()
        return []

    async def first_ends():
        ends[0].set()

    answers.start(until_told(), [])
    second = threading.Thread(target=answers.start, args=(until_told(), []))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    coroutines.run(first_ends())
    second.join(20)
    assert not second.is_alive()
    coroutines.close(1)


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, "64"), ({"batching": True}, "1"), ({"batching": True, "concurrency": 3}, "3")],
)
def test_so_many_coroutines_run_at_once(settings, most):
    @gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32}, **settings)
    async def later(X):  # noqa: N803
        return X

    parameters = declaration_of(later).config["parameters"]
    assert parameters["COROUTINES"] == {"string_value": most}
