"""The pipeline of examples/image_preproc on a simulated GPU: its own configurations, a classifier that needs no PyTorch."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.host_kernel.simulated import imaging_environment
from tests.photos import PHOTOS
from tests.process.device_models import on_device, running_device_server
from tests.process.imaging import expected_pixels
from tests.process.server import wait_until
from tests.waits import poll

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_preproc"
LABELS = (EXAMPLE / "pipeline_repository" / "classifier" / "labels.txt").read_text().split()
CLASSES = 16
IMAGE = 3 * 224 * 224 * 4
TABLE = 112  # bytes that tell the kernel of an image
JPEGS = [photo.read_bytes() for photo in PHOTOS[:2]]

# The scores of an image are its first pixels: taken on the GPU, by the driver alone.
CLASSIFIER = on_device(
    f"""
assert self.args["model_instance_kind"] == "GPU"
if given.is_cpu():
    raise pb_utils.TritonModelException("PIXELS came in host memory")
count = given.shape()[0]
scores = library.array("scores", [count, {CLASSES}])
source, target = library.pointer(given), library.pointer(scores)
for image in range(count):
    ok(d.cuMemcpyDtoDAsync(
        target + image * {4 * CLASSES}, source + image * {IMAGE}, {4 * CLASSES}, library.stream,
    ))
return pb_utils.Tensor.from_dlpack("SCORES", scores)
"""
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for repository in ("model_repository", "pipeline_repository"):
        shutil.copytree(EXAMPLE / repository, models, dirs_exist_ok=True)
    (models / "classifier" / "1" / "model.py").write_text(CLASSIFIER)
    for name in ("image_preproc", "classifier"):
        # The machine, which tests share, has two GPUs: an instance on each would hand on by the host.
        config = models / name / "config.pbtxt"
        text = config.read_text()
        assert "KIND_AUTO" in text
        config.write_text(text.replace("KIND_AUTO", "KIND_GPU gpus: [0]"))
    with running_device_server(models, environment=imaging_environment()) as served:
        # A stub shows a moment later what it has copied: weights of its filter, here.
        wait_until(lambda: served.work("image_preproc")["h2d", "copies"], "the weights")
        yield served


def moved_since(served, names, before=0):
    """Bytes that the first model, and all others, have copied to GPUs and back."""
    kinds = ("h2d", "d2h")
    each = [[served.work(name)[kind, "copied_bytes"] for kind in kinds] for name in names]
    return (np.array([each[0], np.sum(each[1:], axis=0)]) - before).tolist()


def gives(function, value):
    return function() == value


@pytest.mark.parametrize("model", ["photo_labels", "photo_labels_bls"])
def test_no_pixels_leave_the_gpu_between_decoder_and_classifier(served, model):
    scores = expected_pixels(JPEGS, {"SIZE": "224", "RESIZE_SHORTER_SIDE": "256", "DTYPE": "FP32"})[
        :, 0, 0, :CLASSES
    ]
    images = np.empty((len(JPEGS), 1), np.object_)
    images[:, 0] = JPEGS
    tensor = triton.InferInput("IMAGE", list(images.shape), "BYTES").set_data_from_numpy(images)
    with triton.InferenceServerClient(served.server.http_url, network_timeout=120) as client:
        names = ("image_preproc", "classifier", "top_labels", model)
        sent, back = [TABLE * len(JPEGS), 0], [0, 4 * CLASSES * len(JPEGS)]
        for _ in range(2):
            before = moved_since(served, names)
            answer = client.infer(model, [tensor])
            best = np.argsort(-scores, axis=1, kind="stable")[:, :3]
            shares = np.take_along_axis(scores, best, axis=1)
            np.testing.assert_array_equal(answer.as_numpy("PROBABILITIES"), shares)
            told = [[LABELS[index].encode() for index in row] for row in best]
            assert answer.as_numpy("LABELS").tolist() == told
            # What comes back are the probabilities: by who makes them, or for who wants them.
            moved = partial(moved_since, served, names, before)
            assert poll(partial(gives, moved, [sent, back]), 10), moved()
