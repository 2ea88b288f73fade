"""Tensors without elements between models on GPUs: on the device, as others of their kind are."""

from __future__ import annotations

import json

import pytest

from tests.process.device_models import running_device_server, write_device_model
from tests.process.server import write_code_model, write_model

GROUP = "instance_group [{ kind: KIND_GPU gpus: [0] }]"
GIVEN = 'name: "IN" data_type: TYPE_FP32 dims: [-1, 3]'
WORDS = 'name: "OUT" data_type: TYPE_STRING dims: [1]'
ROWS = 'name: "OUT" data_type: TYPE_FP32 dims: [-1, 3]'

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils
"""

# Says where its input is.
WHERE = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0]) for request in requests]

    def answer(self, t):
        said = f"{t.is_cpu()} {t.device} {list(t.shape())}".encode()
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", np.array([said], np.object_))])
"""
)

# Answers with its input, and with rows of its own where it got none.
BACK = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", r.inputs()[0])])
                for r in requests]
"""
)

MADE = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor.empty("OUT", [0, 3], np.float32, "cuda")]) for _ in requests]
"""
)

CALL = """
def call(model, tensor):
    answer = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[tensor]).exec()
    assert not answer.has_error(), answer.error().message()
    return answer.output_tensors()[0]

def renamed(tensor):
    return pb_utils.Tensor.from_dlpack("IN", tensor)

def where(tensor):
    return f"{tensor.is_cpu()} {tensor.device} {list(tensor.shape())}"

empty = pb_utils.Tensor.empty("IN", [0, 3], np.float32, "cuda")
"""

ON_DEVICE = "False cuda:0 [0, 3]"
ON_HOST = "True cpu [0, 3]"


def ensemble(repository, name, members, made):
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    steps = ", ".join(
        f'{{ model_name: "{member}" model_version: -1 '
        f'input_map {{ key: "IN" value: "{"IN" if index == 0 else f"T{index}"}" }} '
        f'output_map {{ key: "OUT" value: "{"OUT" if member == members[-1] else f"T{index + 1}"}" }} }}'
        for index, member in enumerate(members)
    )
    (directory / "config.pbtxt").write_text(
        f'platform: "ensemble"\ninput [{{ {GIVEN} }}]\noutput [{{ {made} }}]\n'
        f"ensemble_scheduling {{ step [{steps}] }}\n"
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_code_model(repository, "caller", config=GROUP)
    write_device_model(repository, "where", WHERE, inputs=GIVEN, outputs=WORDS)
    write_device_model(repository, "back", BACK, inputs=GIVEN, outputs=ROWS)
    write_device_model(repository, "made", MADE, inputs=GIVEN, outputs=ROWS)
    host = {"config": "instance_group [{ kind: KIND_CPU }]", "inputs": GIVEN, "outputs": WORDS}
    write_model(repository, "host_where", WHERE, **host)
    ensemble(repository, "made_where", ["made", "where"], WORDS)
    ensemble(repository, "made_back_where", ["made", "back", "where"], WORDS)
    ensemble(repository, "made_host", ["made", "host_where"], WORDS)
    ensemble(repository, "made_back", ["made", "back"], ROWS)
    with running_device_server(repository) as served:
        yield served


def infer(served, model):
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    path = f"/v2/models/{model}/infer"
    status, _, answer = served.server.request("POST", path, json.dumps(body))
    answer = json.loads(answer)
    assert status == 200, answer
    return answer["outputs"][0]


def test_an_ensembles_edge(served):
    assert infer(served, "made_where")["data"] == [ON_DEVICE]
    assert infer(served, "made_back_where")["data"] == [ON_DEVICE]


def test_an_ensembles_edge_to_the_host(served):
    assert infer(served, "made_host")["data"] == [ON_HOST]


def test_empty_tensors_leave_for_the_network(served):
    assert infer(served, "made_back") == {
        "name": "OUT",
        "datatype": "FP32",
        "shape": [0, 3],
        "data": [],
    }


@pytest.mark.parametrize(("model", "place"), [("where", ON_DEVICE), ("host_where", ON_HOST)])
def test_the_input_of_a_call(served, model, place):
    code = CALL + f"self.said = call('{model}', empty).as_numpy()[0].decode()"
    assert served.server.ask(code, "caller") == (200, place)


def test_the_answer_to_a_call(served):
    code = CALL + "self.said = where(call('back', empty))"
    assert served.server.ask(code, "caller") == (200, ON_DEVICE)


def test_an_answer_that_is_handed_on(served):
    code = CALL + (
        "first = call('back', empty)\n"
        "self.said = call('where', renamed(first)).as_numpy()[0].decode()"
    )
    assert served.server.ask(code, "caller") == (200, ON_DEVICE)


def test_a_tensor_beside_others(served):
    with served.doing("back"), served.doing("where"):
        code = CALL + "assert call('back', empty).as_numpy().shape == (0, 3)"
        assert served.server.ask(code, "caller")[0] == 200
