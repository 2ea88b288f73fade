"""Element types that NumPy has not, or frameworks show otherwise: as they are, on the way in and out."""

import numpy as np
import pytest
import tritonclient.http as over_http

from tests.gpu.clients import registered
from tests.gpu.lane import LIBRARIES, needs_library, running_lane_server
from tests.process.device_models import LIBRARY, write_device_model

KINDS = {"FP16": 2, "BF16": 2, "BOOL": 1, "UINT8": 1, "INT64": 8, "FP64": 8}
COUNT = 10_000

# A framework takes each input and gives it back, by the memory that it has or a copy of it.
_FRAMEWORK = {
    "driver": LIBRARY + "take = copy = lambda x: x",
    "torch": "import torch; take = torch.from_dlpack; copy = torch.clone",
    "cupy": "import cupy; take = cupy.from_dlpack; copy = lambda x: x.copy()",
}
_BACK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(
            [pb_utils.Tensor.from_dlpack("OUT" + t.name()[2:], copy(take(t))) for t in r.inputs()])
            for r in requests]
"""


def tensors(prefix):
    optional = " optional: true" if prefix == "IN" else ""
    return "; ".join(f"{prefix}{kind} {kind} [-1]{optional}" for kind in KINDS)


@pytest.fixture(scope="module", params=LIBRARIES)
def served(request, machine, tmp_path_factory):
    needs_library(request.param)
    repository = tmp_path_factory.mktemp("models")
    source = f"{_FRAMEWORK[request.param]}\n{_BACK}"
    words = f"{tensors('IN')} > {tensors('OUT')}"
    write_device_model(repository, "back", source, tensors=words)
    with running_lane_server(machine, repository) as served:
        served.library = request.param
        yield served


@pytest.mark.parametrize("kind", KINDS)
def test_bits_come_back_as_they_went(served, client, rng, kind):
    if kind == "BF16" and served.library == "cupy":
        pytest.skip("CuPy has no bfloat16")
    nbytes = KINDS[kind] * COUNT
    # Bits of all kinds, NaNs too; a bool is 0 or 1.
    sent = rng.integers(0, 2 if kind == "BOOL" else 256, nbytes, np.uint8)
    with (
        over_http.InferenceServerClient(served.server.http_url) as protocol,
        registered(client, protocol, nbytes, nbytes) as (source, target),
    ):
        client.write(source, sent)
        given = over_http.InferInput(f"IN{kind}", [COUNT], kind)
        given.set_shared_memory(source.name, nbytes)
        output = over_http.InferRequestedOutput(f"OUT{kind}")
        output.set_shared_memory(target.name, nbytes)
        with served.costing("back", d2d=(nbytes, 1), waits=(1, 1)):
            protocol.infer("back", [given], outputs=[output])
        assert np.array_equal(client.read(target, np.uint8), sent)
