"""Tensors on a GPU of each datatype and of no elements, through models and between them."""

import json

import numpy as np
import pytest
import tritonclient.http as httpclient

from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.dtypes import numpy_dtype
from tests.process.device_models import LIBRARY, running_device_server, write_device_model
from tests.process.server import write_code_model, write_model
from tests.process.test_device_edges import ensemble
from tests.process.test_device_network import placement

DATATYPE_NAMES = [name for name in DATATYPES if name != "BYTES"]
WORDS = "IN FP32 [-1, 3] > OUT STRING [1]"
ROWS = "IN FP32 [-1, 3] > OUT FP32 [-1, 3]"
ON_DEVICE = "False cuda:0 [0, 3]"
ON_HOST = "True cpu [0, 3]"

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answer(request)) for request in requests]
"""
# Gives back what it has got, as a framework hands it on: by a capsule, without looking at it.
KEEP = (
    HEAD
    + """
    def answer(self, request):
        return [self.kept(given) for given in request.inputs()]

    def kept(self, given):
        assert not given.is_cpu() or not all(given.shape())
        handed = given.to_dlpack() if given.name() in ("BF16", "BOOL") else given
        name = "OUT" if given.name() == "IN" else given.name()
        tensor = pb_utils.Tensor.from_dlpack(name, handed)
        assert tensor.device == given.device
        return tensor
"""
)
# Answers with tensors of no elements that are on the GPU, each made in another way.
NOTHING = (
    LIBRARY
    + HEAD
    + """
    def answer(self, request):
        way = int(request.inputs()[0].as_numpy().flat[0])
        shape = (0, 3)
        tensor = [
            lambda: pb_utils.Tensor.empty("OUT", shape, np.float32, "cuda"),
            lambda: request.output("OUT", shape, np.float32, "cuda"),
            lambda: pb_utils.Tensor.from_dlpack("OUT", Array(0, shape, np.float32, None)),
            lambda: pb_utils.Tensor.from_dlpack(
                "OUT", pb_utils.Tensor.empty("A", shape, np.float32, "cuda").to_dlpack()),
        ][way]()
        assert not tensor.is_cpu()
        return [tensor]
"""
)
# Says where its input is.
WHERE = (
    HEAD
    + """
    def answer(self, request):
        t = request.inputs()[0]
        said = f"{t.is_cpu()} {t.device} {list(t.shape())}".encode()
        return [pb_utils.Tensor("OUT", np.array([said], np.object_))]
"""
)
CALL = """
def call(model, tensor):
    answer = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[tensor]).exec()
    assert not answer.has_error(), answer.error().message()
    return answer.output_tensors()[0]

def where(tensor):
    return f"{tensor.is_cpu()} {tensor.device} {list(tensor.shape())}"

empty = pb_utils.Tensor.empty("IN", [0, 3], np.float32, "cuda")
"""


@pytest.fixture(scope="module")
def served(repository):
    kinds = "; ".join(f"{name} {name} [-1, -1]" for name in DATATYPE_NAMES)
    write_device_model(
        repository, "keep", KEEP, config=placement("device"), tensors=f"{kinds} > {kinds}"
    )
    write_code_model(repository, "caller", config="instance_group [{ kind: KIND_GPU gpus: [0] }]")
    write_device_model(repository, "where", WHERE, tensors=WORDS)
    write_device_model(repository, "back", KEEP, tensors=ROWS)
    write_device_model(repository, "nothing", NOTHING, tensors=ROWS)
    host = {"config": "instance_group [{ kind: KIND_CPU }]", "tensors": WORDS}
    write_model(repository, "host_where", WHERE, **host)
    for name, members, made in (
        ("nothing_where", ["nothing", "where"], WORDS),
        ("nothing_back_where", ["nothing", "back", "where"], WORDS),
        ("nothing_host", ["nothing", "host_where"], WORDS),
        ("nothing_back", ["nothing", "back"], ROWS),
    ):
        ensemble(repository, name, members, made)
    with running_device_server(repository) as served:
        yield served


@pytest.mark.parametrize("shape", [(3, 50), (1, 1), (0, 4)])
def test_each_datatype_comes_back_as_it_went(served, shape):
    arrays = {
        name: np.random.default_rng(1).integers(0, 2, shape).astype(numpy_dtype(name))
        for name in DATATYPE_NAMES
    }
    inputs = [httpclient.InferInput(name, list(shape), name) for name in arrays]
    for tensor, array in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array)
    before = served.work("keep")
    with httpclient.InferenceServerClient(served.server.http_url) as client:
        answer = client.infer("keep", inputs)
    for name, array in arrays.items():
        returned = answer.as_numpy(name)
        assert returned.shape == shape
        assert returned.tolist() == array.tolist()
    after = served.work("keep")
    nbytes = sum(array.size * DATATYPES[name].item_size for name, array in arrays.items())
    for kind in ("h2d", "d2h"):
        assert after[kind, "copied_bytes"] - before[kind, "copied_bytes"] == nbytes


def infer(served, model, way=0):
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [way] * 3}]}
    path = f"/v2/models/{model}/infer"
    status, _, answer = served.server.request("POST", path, json.dumps(body))
    answer = json.loads(answer)
    assert status == 200, answer
    return answer["outputs"][0]


@pytest.mark.parametrize("way", range(4))
def test_no_elements(served, way):
    for _ in range(2):
        with served.doing("nothing"), served.doing("back"):
            for model in ("nothing", "nothing_back"):
                assert infer(served, model, way) == {
                    "name": "OUT",
                    "datatype": "FP32",
                    "shape": [0, 3],
                    "data": [],
                }
            assert infer(served, "nothing_where", way)["data"] == [ON_DEVICE]
            assert infer(served, "nothing_back_where", way)["data"] == [ON_DEVICE]
            assert infer(served, "nothing_host", way)["data"] == [ON_HOST]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("call('where', empty).as_numpy()[0].decode()", ON_DEVICE),
        ("call('host_where', empty).as_numpy()[0].decode()", ON_HOST),
        ("where(call('back', empty))", ON_DEVICE),
        (
            "call('where', pb_utils.Tensor.from_dlpack('IN', call('back', empty))).as_numpy()[0].decode()",
            ON_DEVICE,
        ),
        ("call('back', empty).as_numpy().shape", "(0, 3)"),
    ],
    ids=["input", "input on the host", "answer", "answer handed on", "answer read"],
)
def test_no_elements_in_calls(served, code, said):
    with served.doing("back"), served.doing("where"):
        assert served.server.ask(f"{CALL}self.said = {code}", "caller") == (200, said)
