"""Tensors on a GPU of each datatype and of no elements, through models and between them."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.http as httpclient

from gpubridge.tensor.dtypes import DATATYPES, numpy_dtype
from tests.process.device_models import LIBRARY, running_device_server, write_device_model
from tests.process.test_device_edges import ensemble

DATATYPE_NAMES = [name for name in DATATYPES if name != "BYTES"]
PLACED = 'parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }'

# Gives back what it has got, as a framework hands it on: by a capsule, without looking at it.
KEEP = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0]) for request in requests]

    def answer(self, given):
        assert not given.is_cpu() or not all(given.shape())
        handed = given.to_dlpack() if self.bare else given
        tensor = pb_utils.Tensor.from_dlpack("OUT", handed)
        assert tensor.device == given.device
        return pb_utils.InferenceResponse([tensor])
"""

# Answers with tensors of no elements that are on the GPU, each made in another way.
NOTHING = (
    LIBRARY
    + """

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        way = int(request.inputs()[0].as_numpy()[0])
        tensor = [
            lambda: pb_utils.Tensor.empty("OUT", (0,), np.float32, "cuda"),
            lambda: request.output("OUT", (0,), np.float32, "cuda"),
            lambda: pb_utils.Tensor.from_dlpack("OUT", Array(0, (0,), np.float32, None)),
            lambda: pb_utils.Tensor.from_dlpack(
                "OUT", pb_utils.Tensor.empty("A", (0,), np.float32, "cuda").to_dlpack()),
        ][way]()
        assert not tensor.is_cpu()
        return pb_utils.InferenceResponse([tensor])
"""
)

# Takes anything, and says how much.
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "OUT", np.array([r.inputs()[0].as_numpy().size], np.float32))]) for r in requests]
"""


def tensors(datatype):
    kind = DATATYPES[datatype].config_name
    return {
        "inputs": f'name: "IN" data_type: {kind} dims: [-1, -1]',
        "outputs": f'name: "OUT" data_type: {kind} dims: [-1, -1]',
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    for datatype in DATATYPE_NAMES:
        source = KEEP.replace("self.bare", str(datatype in ("BF16", "BOOL")))
        write_device_model(repository, datatype, source, config=PLACED, **tensors(datatype))
    write_device_model(repository, "nothing", NOTHING)
    write_device_model(repository, "count", COUNT)
    ensemble(repository, "nothing_counted", ["nothing", "count"])
    with running_device_server(repository) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with httpclient.InferenceServerClient(served.server.http_url) as client:
        yield client


def sent(datatype, array):
    tensor = httpclient.InferInput("IN", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


@pytest.mark.parametrize("datatype", DATATYPE_NAMES)
@pytest.mark.parametrize("shape", [(3, 50), (1, 1), (0, 4)])
def test_each_datatype_comes_back_as_it_went(served, client, datatype, shape):
    dtype = numpy_dtype(datatype)
    array = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    nbytes = array.size * DATATYPES[datatype].item_size
    before = served.work(datatype)
    answer = client.infer(datatype, [sent(datatype, array)])
    returned = answer.as_numpy("OUT")
    assert returned.shape == shape
    assert returned.tolist() == array.tolist()
    after = served.work(datatype)
    for kind in ("h2d", "d2h"):
        assert after[kind, "copied_bytes"] - before[kind, "copied_bytes"] == nbytes


@pytest.mark.parametrize("way", range(4))
def test_no_elements(served, way):
    for _ in range(2):
        with served.doing("nothing"):
            assert served.infer("nothing", [way]) == (200, [])
            assert served.infer("nothing_counted", [way]) == (200, [0])
