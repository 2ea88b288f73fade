"""The examples for a GPU: what they answer, and what the bridge copies for them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.gpu.lane import SIMULATED, needs_library, running_lane_server
from tests.photos import PHOTOS
from tests.process.imaging import ask, expected_pixels
from tests.process.test_examples import run_example
from tests.process.test_examples_answer import SHOWN

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGE = 3 * 224 * 224 * 4
SETTINGS = {
    "SIZE": "224",
    "DTYPE": "FP32",
    "LAYOUT": "NHWC",
    "NORMALIZE_MEAN": "0.5, 0.5, 0.5",
    "NORMALIZE_STD": "0.5, 0.5, 0.5",
}
MEAN = 1.5 / 255 / 0.5
"""By which decoders may differ in the mean over a photograph."""


@pytest.fixture(scope="module")
def served(machine, tmp_path_factory):
    environment = {}
    if SIMULATED:
        from tests.host_kernel.simulated import imaging_environment

        environment = imaging_environment(tmp_path_factory.mktemp("cache"))
    else:
        needs_library("cupy")
        if importlib.util.find_spec("nvidia.nvimgcodec") is None:
            pytest.skip("the model needs nvImageCodec")
    repositories = [
        EXAMPLES / "image_preproc" / "python_repository",
        EXAMPLES / "cupy_addsub" / "model_repository",
    ]
    with running_lane_server(
        machine, repositories, arena=64 << 20, environment=environment
    ) as served:
        yield served


def test_photographs(served):
    files = [photo.read_bytes() for photo in PHOTOS]
    expected = expected_pixels(files, SETTINGS)
    with triton.InferenceServerClient(served.server.http_url, network_timeout=120) as client:
        ask(client, files, "image_preproc_python")
        with served.costing("image_preproc_python", waits=(1, 1), d2h=(len(files) * IMAGE, 1)):
            made = ask(client, files, "image_preproc_python")
    apart = np.abs(made - expected).reshape(len(files), -1).mean(axis=1)
    print(f"decoders differ by {apart.max() * 127.5:.3f} levels")
    assert (apart < MEAN).all()


def test_cupy_addsub(served):
    ((_, output),) = SHOWN.findall((EXAMPLES / "cupy_addsub" / "README.md").read_text())
    assert run_example("add_sub_client.py", served.server, "--model=cupy_addsub") == output
