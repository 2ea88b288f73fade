"""The pipeline of examples/image_preproc on a simulated GPU: its own configurations, a classifier that needs no PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.host_kernel.simulated import imaging_environment
from tests.photos import PHOTOS
from tests.process.device_models import LIBRARY, running_device_server
from tests.process.imaging import expected_pixels

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_preproc"
LABELS = (EXAMPLE / "pipeline_repository" / "classifier" / "labels.txt").read_text().split()
CLASSES = 16
IMAGE = 3 * 224 * 224 * 4
TABLE = 112  # bytes that tell the kernel of an image
JPEGS = [photo.read_bytes() for photo in PHOTOS[:2]]

# The scores of an image are its first pixels: taken on the GPU, by the driver alone.
CLASSIFIER = (
    LIBRARY
    + f"""

class TritonPythonModel:
    def initialize(self, args):
        assert args["model_instance_kind"] == "GPU"
        self.library = Library(args)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (given,) = request.inputs()
        if given.is_cpu():
            raise pb_utils.TritonModelException("PIXELS came in host memory")
        count = given.shape()[0]
        scores = self.library.array("scores", [count, {CLASSES}])
        source, target = self.library.pointer(given), self.library.pointer(scores)
        for image in range(count):
            ok(d.cuMemcpyDtoDAsync(
                target + image * {4 * CLASSES}, source + image * {IMAGE}, {4 * CLASSES},
                self.library.stream,
            ))
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("SCORES", scores)])
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
        yield served


@pytest.mark.parametrize("model", ["photo_labels", "photo_labels_bls"])
def test_no_pixels_leave_the_gpu_between_decoder_and_classifier(served, model):
    scores = expected_pixels(JPEGS, {"SIZE": "224", "RESIZE_SHORTER_SIDE": "256", "DTYPE": "FP32"})[
        :, 0, 0, :CLASSES
    ]
    images = np.empty((len(JPEGS), 1), np.object_)
    images[:, 0] = JPEGS
    tensor = triton.InferInput("IMAGE", list(images.shape), "BYTES")
    tensor.set_data_from_numpy(images)
    with triton.InferenceServerClient(served.server.http_url, network_timeout=120) as client:
        for _ in range(2):
            names = ("image_preproc", "classifier", "top_labels", model)
            before = {name: served.work(name) for name in names}
            answer = client.infer(model, [tensor])
            moved = {
                name: tuple(
                    served.work(name)[kind, "copied_bytes"] - before[name][kind, "copied_bytes"]
                    for kind in ("h2d", "d2h")
                )
                for name in names
            }
            best = np.argsort(-scores, axis=1, kind="stable")[:, :3]
            shares = np.take_along_axis(scores, best, axis=1)
            np.testing.assert_array_equal(answer.as_numpy("PROBABILITIES"), shares)
            told = [[LABELS[index].encode() for index in row] for row in best]
            assert answer.as_numpy("LABELS").tolist() == told
            count = len(JPEGS)
            assert moved["image_preproc"] == (TABLE * count, 0)
            # What comes back are the probabilities: by who makes them, or for who wants them.
            others = np.sum([moved[name] for name in names[1:]], axis=0)
            assert others.tolist() == [0, 4 * CLASSES * count], moved
