"""Models that do everything wrong: their client gets the reason, and others do not notice."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request
from tests.process.server import LITTLE_MEMORY, PURE, running_server, write_model

FAULTY = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        fault = requests[0].inputs()[0].as_numpy()[0].decode()
        return getattr(self, fault)(requests)

    def good(self, requests):
        return [self.answer(r.inputs()[0].as_numpy()) for r in requests]

    def answer(self, array):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])

    def raises(self, requests):
        raise ValueError("planted")

    def exits(self, requests):
        sys.exit(3)

    def recurses(self, requests):
        return self.recurses(requests)

    def lone_surrogate(self, requests):
        raise ValueError("\\ud800")

    def long_text(self, requests):
        raise ValueError("x" * 3_000_000)

    def nothing(self, requests):
        return None

    def none_of_them(self, requests):
        return []

    def too_many(self, requests):
        return self.good(requests) * 2

    def a_tuple(self, requests):
        return tuple(self.good(requests))

    def a_dict(self, requests):
        return {"OUT": 1}

    def junk(self, requests):
        return [42 for _ in requests]

    def tensors(self, requests):
        return [pb_utils.Tensor("OUT", np.zeros(1)) for _ in requests]

    def thousands(self, requests):
        tensor = pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())
        return [pb_utils.InferenceResponse([tensor] * 5000) for _ in requests]

    def dtype(self, requests):
        return [self.answer(np.zeros(2, np.complex64)) for _ in requests]

    def no_name(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("", np.zeros(1))]) for _ in requests]

    def strings(self, requests):
        return [self.answer(np.array(["\\ud800"], dtype=object)) for _ in requests]

    def not_found(self, requests):
        error = pb_utils.TritonError("lost", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]

    def surrogate_error(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("\\ud800")) for _ in requests]

    def wrong_dtype(self, requests):
        return [self.answer(np.arange(3, dtype=np.int16)) for _ in requests]

    def unknown_output(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("X", np.zeros(1))]) for _ in requests]

    def no_output(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def too_large(self, requests):
        return [self.answer(np.zeros(1 << 27, np.uint8)) for _ in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    string = "data_type: TYPE_STRING dims: [-1]"
    write_model(
        repository,
        "faulty",
        FAULTY,
        inputs=f'name: "IN" {string}',
        outputs=f'name: "OUT" {string}',
    )
    with running_server(repository, *LITTLE_MEMORY) as server:
        stubs = server.stubs()
        yield server
        assert server.stubs() == stubs
        assert "Traceback" not in server.log()


@pytest.fixture(autouse=True)
def good_afterwards(server):
    yield
    assert infer_strings(server, "faulty", [b"good"])[0] == 200


def infer_strings(server, model, strings):
    data = b"".join(struct.pack("<I", len(s)) + s for s in strings)
    field, body = binary_request([("IN", "BYTES", [len(strings)], data)])
    status, _, answer = server.request(
        "POST", f"/v2/models/{model}/infer", body, dict([field.split(": ")])
    )
    return status, answer


FAULTS = {
    "raises": "ValueError: planted",
    "exits": "SystemExit: 3",
    "recurses": "RecursionError",
    "lone_surrogate": "ValueError: ",
    "long_text": "xxxxxxxxxx",
    "none_of_them": "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
    "too_many": "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2",
    "nothing": "Expected a list in the execute return",
    "a_tuple": "Expected a list in the execute return, found type '<class 'tuple'>'",
    "a_dict": "Expected a list in the execute return, found type '<class 'dict'>'",
    "junk": "Expected an 'InferenceResponse' object",
    "tensors": "Expected an 'InferenceResponse' object",
    "dtype": "NumPy dtype is not supported",
    "no_name": "Tensor name cannot be an empty string",
    "strings": "UnicodeEncodeError",
    "missing_fault": "AttributeError",
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
    entry = 'name: "{}" data_type: TYPE_FP32 dims: [-1]'
    write_model(
        tmp_path,
        "other",
        OTHER_OUTPUTS,
        config="instance_group [{ count: 2 }]",
        outputs=" }, { ".join(map(entry.format, ["OUT", "KIND", "RANK", "RIGHT"])),
    )
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
        ("not_found", 404, "lost"),
        ("surrogate_error", 500, "?"),
        ("thousands", 400, "expected at most 4096 tensors in a request or response, got 5000"),
        ("too_large", 503, "shared memory arena is full"),
    ],
)
def test_errors_of_their_own(server, fault, status, text):
    got, answer = infer_strings(server, "faulty", [fault.encode()])
    assert got == status
    assert text in json.loads(answer)["error"]


@pytest.mark.parametrize("fault", ["wrong_dtype", "unknown_output", "no_output"])
def test_mistakes_that_triton_accepts_are_accepted(server, fault):
    status, answer = infer_strings(server, "faulty", [fault.encode()])
    assert status == 200
    assert b'"model_name":"faulty"' in answer
