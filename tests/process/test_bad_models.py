"""Models that do everything wrong: their client gets the reason, and others do not notice."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request
from tests.process.server import LITTLE_MEMORY, PURE, running_server, write_model

# Runs the code that it is sent, and returns its ``returned``; "good" is the answer that is right.
FAULTY = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(array, name="OUT"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])

def failure(*error):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*error))

class TritonPythonModel:
    def execute(self, requests):
        given = requests[0].inputs()[0].as_numpy()
        names = {**globals(), "given": given, "good": [answer(given)], "returned": [answer(given)]}
        exec(given[0].decode(), names)
        return names["returned"]
"""


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "faulty", FAULTY, tensors="IN STRING [-1] > OUT STRING [-1]")
    with running_server(repository, *LITTLE_MEMORY) as server:
        stubs = server.stubs()
        yield server
        assert server.stubs() == stubs
        assert "Traceback" not in server.log()


@pytest.fixture(autouse=True)
def good_afterwards(server):
    yield
    assert infer_strings(server, "faulty", [b"pass"])[0] == 200


def infer_strings(server, model, strings):
    data = b"".join(struct.pack("<I", len(s)) + s for s in strings)
    field, body = binary_request([("IN", "BYTES", [len(strings)], data)])
    status, _, answer = server.request(
        "POST", f"/v2/models/{model}/infer", body, dict([field.split(": ")])
    )
    return status, answer


FAULTS = {
    "def recurse(): recurse()\nrecurse()": "RecursionError",
    "raise ValueError('\\ud800')": "ValueError: ",
    "raise ValueError('x' * 3_000_000)": "xxxxxxxxxx",
    "returned = None": "Expected a list in the execute return",
    "returned = {'OUT': 1}": "Expected a list in the execute return, found type '<class 'dict'>'",
    "answer(np.array(['\\ud800'], object))": "UnicodeEncodeError",
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.items())
def test_a_models_mistake_is_reported_to_its_client(server, fault, text):
    status, answer = infer_strings(server, "faulty", [fault.encode()])
    assert status == 500
    error = json.loads(answer)["error"]
    assert error.startswith("Failed to process the request(s) for model 'faulty_0")
    assert text in error


OTHER_OUTPUTS = answering(
    """
one = np.zeros(1, np.float32)
return respond(OUTPUT=one, KIND=np.zeros(1, np.float64), RANK=np.zeros((1, 1), np.float32), RIGHT=one)
"""
)


@pytest.mark.parametrize("environment", [{}, PURE], ids=["compiled", "python"])
def test_outputs_that_are_not_as_configured_are_told_once(tmp_path, environment):
    two, outputs = (
        "instance_group [{ count: 2 }]",
        "> OUT FP32 [-1]; KIND FP32 [-1]; RANK FP32 [-1]",
    )
    write_model(tmp_path, "other", OTHER_OUTPUTS, config=two, tensors=f"{outputs}; RIGHT FP32 [-1]")
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}

    def request(**more):
        body = json.dumps({"inputs": [tensor], **more})
        return server.request("POST", "/v2/models/other/infer", body)[0]

    with running_server(tmp_path, environment=environment) as server:
        assert request(outputs=[{"name": "RIGHT"}]) == 200
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: request(), range(40))) == {200}
        said = [line.partition("] ")[2] for line in server.log().splitlines() if line[0] == "W"]
    told = sorted(line.partition("] ")[2] for line in said if "other_0" in line)
    assert told == [
        (
            "a response has an output 'OUTPUT', which is not sent: the configuration has 'KIND', 'OUT', "
            "'RANK', 'RIGHT'"
        ),
        "a response has no output 'OUT', which the configuration has; it has 'KIND', 'RANK', 'RIGHT'",
        "output 'KIND' of a response is FP64 with 1 dimensions, the configuration says FP32 with 1",
        "output 'RANK' of a response is FP32 with 2 dimensions, the configuration says FP32 with 1",
    ]


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        ("failure('\\ud800')", 500, "?"),
        (
            "pb_utils.InferenceResponse([pb_utils.Tensor('OUT', given)] * 5000)",
            400,
            "expected at most 4096 tensors in a request or response, got 5000",
        ),
        ("answer(np.zeros(1 << 27, np.uint8))", 503, "shared memory arena is full"),
    ],
)
def test_errors_of_their_own(server, fault, status, text):
    got, answer = infer_strings(server, "faulty", [f"returned = [{fault}]".encode()])
    assert got == status
    assert text in json.loads(answer)["error"]
