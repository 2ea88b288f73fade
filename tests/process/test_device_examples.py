"""The examples for a GPU on a simulated one, with doubles of CuPy and nvImageCodec."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.host_kernel.simulated import imaging_environment
from tests.image_corpus import GOOD_FILES, HOSTILE_FILES
from tests.photos import PHOTOS
from tests.process.device_models import (
    on_device,
    running_device_server,
    write_device_model,
)
from tests.process.ensembles import write_ensemble
from tests.process.imaging import ask, expected_pixels
from tests.process.test_examples import run_example
from tests.process.test_examples_answer import SHOWN

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "image_preproc_python"
SEED = {
    "SIZE": "224",
    "RESIZE_SHORTER_SIDE": "256",
    "DTYPE": "FP32",
    "LAYOUT": "NHWC",
    "NORMALIZE_MEAN": "0.5, 0.5, 0.5",
    "NORMALIZE_STD": "0.5, 0.5, 0.5",
}
# As the configured backend's example.
IMAGENET = {
    **SEED,
    "LAYOUT": "NCHW",
    "NORMALIZE_MEAN": "0.485, 0.456, 0.406",
    "NORMALIZE_STD": "0.229, 0.224, 0.225",
}
JPEGS = [photo.read_bytes() for photo in PHOTOS]
# A simulated GPU takes half a second for each.
FEW = JPEGS[:2]
IMAGE = 3 * 224 * 224 * 4
#: Of the values that the kernel rounds once and Pillow twice.
ONE_LEVEL = 1.01 / 255 / 0.224

# Takes pixels where they are, and gives the first of each image away.
TAKER = on_device(
    """
if given.is_cpu():
    raise pb_utils.TritonModelException("pixels came in host memory")
first = library.array("first", [given.shape()[0], 3])
source, target = library.pointer(given), library.pointer(first)
for image in range(given.shape()[0]):
    ok(d.cuMemcpyDtoDAsync(target + 12 * image, source + 602112 * image, 12, library.stream))
return pb_utils.Tensor.from_dlpack("FIRST", first)
"""
)


def write_imagenet(repository):
    """Write the example with the settings of the configured backend."""
    source = EXAMPLES / "image_preproc" / "python_repository" / MODEL
    text = (source / "config.pbtxt").read_text().replace(MODEL, "imagenet")
    text = text.replace("[ 224, 224, 3 ]", "[ 3, 224, 224 ]")
    for key, value in IMAGENET.items():
        text = re.sub(rf'(key: "{key}" value: {{ string_value: )"[^"]*"', rf'\1"{value}"', text)
    shutil.copytree(source, repository / "imagenet")
    (repository / "imagenet" / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    write_imagenet(models)
    write_device_model(
        models,
        "taker",
        TAKER,
        tensors="PIXELS FP32 [224, 224, 3] > FIRST FP32 [3]",
        config="max_batch_size: 32",
    )
    steps = f"{MODEL} IMAGE=IMAGE > PIXELS=pixels", "taker PIXELS=pixels > FIRST=FIRST"
    images = "IMAGE STRING [1] > FIRST FP32 [3]"
    write_ensemble(models, "first_pixels", *steps, tensors=images, config="max_batch_size: 32")
    for repository in ("image_preproc/python_repository", "cupy_addsub/model_repository"):
        shutil.copytree(EXAMPLES / repository, models, dirs_exist_ok=True)
    with running_device_server(models, environment=imaging_environment()) as served:
        yield served


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(served.server.http_url, network_timeout=120) as client:
        yield client


def check(client, files, model=MODEL, settings=SEED):
    made = ask(client, files, model)
    np.testing.assert_allclose(made, expected_pixels(files, settings), atol=ONE_LEVEL, rtol=0)


def test_photographs_become_what_the_backend_makes_of_them(client):
    check(client, JPEGS)
    check(client, FEW, "imagenet", IMAGENET)


def test_one_photograph(client):
    assert ask(client, JPEGS[:1], MODEL).shape == (1, 224, 224, 3)


@pytest.mark.parametrize("turn", range(1, 9))
def test_photographs_are_turned(client, turn):
    check(client, [GOOD_FILES[f"jpeg-exif-{turn}"]])


def test_the_counters_are_those_of_the_backend(served, client):
    """Pixels are never on the host: what comes back is the result, once, with one wait."""
    check(client, FEW)
    with served.doing(MODEL, d2h=(len(FEW) * IMAGE, 1), waits=1):
        check(client, FEW)


def test_pixels_are_handed_to_the_next_model_without_a_copy(served, client):
    expected = expected_pixels(FEW, SEED)[:, 0, 0, :]
    for _ in range(3):
        with served.doing(MODEL):
            images = np.array(FEW, np.object_).reshape(-1, 1)
            tensor = triton.InferInput("IMAGE", list(images.shape), "BYTES")
            tensor.set_data_from_numpy(images)
            first = client.infer("first_pixels", [tensor]).as_numpy("FIRST")
        np.testing.assert_allclose(first, expected, atol=ONE_LEVEL, rtol=0)


def test_nothing_stays_on_the_gpu(served, client):
    check(client, FEW)
    used = served.machine.used(0)
    for _ in range(5):
        check(client, FEW)
    assert served.machine.used(0) == used


@pytest.mark.parametrize("name", ["nothing", "a text", "jpeg: its header", "jpeg: a half"])
def test_a_bad_image_is_named(client, name):
    hostile, _ = HOSTILE_FILES[name]
    with pytest.raises(InferenceServerException, match=r"IMAGE\[1\]: expected") as refused:
        ask(client, [JPEGS[0], hostile], MODEL)
    assert refused.value.status() == "400"
    check(client, JPEGS[:1])


def test_a_header_that_claims_gigapixels_is_refused(client):
    bomb, _ = HOSTILE_FILES["jpeg: too large"]
    with pytest.raises(InferenceServerException, match=r"IMAGE\[0\]: expected at most 50000000"):
        ask(client, [bomb], MODEL)


def test_its_client_shows_every_photograph(served, tmp_path):
    sheet = tmp_path / "sheet.png"
    printed = run_example(
        "image_preproc/client.py", served.server, f"--model={MODEL}", f"--contact-sheet={sheet}"
    )
    for photo in PHOTOS:
        assert f"{photo.name:28} [224, 224, 3] float32" in printed
    assert sheet.exists()


def test_cupy_addsub_answers_what_its_readme_shows(served):
    ((_, output),) = SHOWN.findall((EXAMPLES / "cupy_addsub" / "README.md").read_text())
    assert run_example("add_sub_client.py", served.server, "--model=cupy_addsub") == output


def test_cupy_addsub_copies_nothing_but_what_crosses(served):
    run_example("add_sub_client.py", served.server, "--model=cupy_addsub")
    before = served.work("cupy_addsub")
    run_example("add_sub_client.py", served.server, "--model=cupy_addsub")
    after = served.work("cupy_addsub")
    spent = {key: after[key] - before[key] for key in after}
    assert [spent[kind, "copied_bytes"] for kind in ("h2d", "d2h", "d2d")] == [32, 32, 0]
