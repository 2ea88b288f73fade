"""image_preproc on a GPU: the kernel's levels against Pillow's, decoders, and hostile files.

Where the pixels are the same, the levels have to be Pillow's; decoders of different makers do not give
the same pixels of a JPEG, which is looked at apart.
"""

import io
import re

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.gpu.lane import SIMULATED, running_lane_server
from tests.image_corpus import GOOD_FILES, HOSTILE_FILES
from tests.photos import PHOTOS
from tests.process.device_models import ARENA
from tests.process.imaging import ask, expected_pixels, write_image_model

SIZES = [(1, 1), (1, 9), (33, 2), (50, 40), (224, 224), (500, 375), (257, 1999), (1999, 257)]
LARGE = [(4000, 3000), (8000, 6000), (3, 40000)]
FILTERS = ["nearest", "bilinear", "bicubic", "lanczos"]
MODELS = {
    **{name: {"DECODER": "pillow", "INTERPOLATION": name, "SIZE": "224"} for name in FILTERS},
    "pad": {"DECODER": "pillow", "RESIZE_MODE": "pad", "PAD_COLOR": "9, 120, 250", "SIZE": "160"},
    "stretch": {"DECODER": "pillow", "RESIZE_MODE": "stretch", "SIZE": "90, 333"},
    "fp32": {"DECODER": "pillow", "DTYPE": "FP32"},
    "fp16": {"DECODER": "pillow", "DTYPE": "FP16", "LAYOUT": "NHWC"},
    "auto": {"SIZE": "224"},
    "chunked": {"SIZE": "224", "DECODE_BYTES": 2_000_000},
    "gpu_only": {"SIZE": "224", "DECODE_ENGINES": "gpu"},
}
MEAN_LEVELS = 1.5
"""By which decoders may differ in the mean over a photograph."""


class Served:
    def __init__(self, lane, parameters, client):
        self.lane = lane
        self.parameters = parameters
        self.client = client

    def compare(self, files, model):
        """Return the differences between what the GPU and what Pillow makes of files."""
        made = ask(self.client, files, model).astype(np.float64)
        return np.abs(made - expected_pixels(files, self.parameters[model]))


@pytest.fixture(scope="module")
def served(machine, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    parameters = {
        name: write_image_model(repository, name, kind="KIND_GPU", **settings)
        for name, settings in MODELS.items()
    }
    environment = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    if SIMULATED:
        from tests.host_kernel.simulated import imaging_environment

        environment = imaging_environment(tmp_path_factory.mktemp("cache"))
    with (
        running_lane_server(
            machine, repository, arena=ARENA if SIMULATED else 256 << 20, environment=environment
        ) as lane,
        triton.InferenceServerClient(lane.server.http_url, network_timeout=120) as client,
    ):
        assert "images are preprocessed on the CPU" not in lane.server.log()
        yield Served(lane, parameters, client)


def noise(width, height):
    """A picture without a loss, whatever decodes it."""
    rows = np.random.default_rng(7).integers(0, 256, (min(height, 64), width, 3), np.uint8)
    pixels = np.tile(rows, (-(-height // len(rows)), 1, 1))[:height]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


@pytest.mark.parametrize("model", [*FILTERS, "pad", "stretch"])
def test_levels_are_pillows(served, model):
    difference = served.compare([noise(*size) for size in SIZES], model)
    print(f"{model}: {np.mean(difference != 0):.2e} of the levels differ, by {difference.max()}")
    # Lanczos has a sine, whose last bit may be another one here.
    assert np.mean(difference > 0) <= (1e-3 if model == "lanczos" else 0)
    assert difference.max() <= 1


@pytest.mark.parametrize("size", LARGE, ids=lambda size: f"{size[0]}x{size[1]}")
def test_large_images(served, size):
    if SIMULATED and size[0] > 5:
        pytest.skip("takes minutes on the simulated driver")
    for model in ("bilinear", "bicubic"):
        assert served.compare([noise(*size)], model).max() == 0


@pytest.mark.parametrize("model", ["fp32", "fp16"])
def test_values_are_those_of_the_cpu_bit_for_bit(served, model):
    assert served.compare([noise(500, 375), noise(61, 43)], model).max() == 0


@pytest.mark.parametrize("name", [name for name in GOOD_FILES if not name.startswith("jpeg")])
def test_formats(served, name):
    assert served.compare([GOOD_FILES[name]], "auto").max() == 0


@pytest.mark.parametrize("model", ["auto", "chunked", "gpu_only"])
def test_photographs_by_the_gpus_decoder(served, model):
    difference = served.compare([photo.read_bytes() for photo in PHOTOS], model)
    for photo, values in zip(PHOTOS, difference, strict=True):
        print(
            f"{photo.stem}: decoders differ by {values.mean():.3f} levels, {values.max()} at most"
        )
        assert values.mean() < MEAN_LEVELS


@pytest.mark.parametrize("turn", range(1, 9))
def test_photographs_are_turned_as_exif_says(served, turn):
    # Noise, of which decoders make what they like; turned otherwise, it would be 70 levels.
    assert served.compare([GOOD_FILES[f"jpeg-exif-{turn}"]], "auto").mean() < 30


def test_a_large_batch_is_answered_in_its_order(served):
    files = [photo.read_bytes() for photo in PHOTOS] * 8
    difference = served.compare(files, "auto").reshape(len(files), -1)
    assert (difference.mean(axis=1) < MEAN_LEVELS).all()


@pytest.mark.parametrize("name", [name for name, (_, text) in HOSTILE_FILES.items() if text])
def test_hostile_files_get_their_errors(served, name):
    good = PHOTOS[0].read_bytes()
    hostile, _ = HOSTILE_FILES[name]
    with pytest.raises(InferenceServerException, match=re.escape("IMAGE[1]: ")):
        ask(served.client, [good, hostile], "auto")
    assert served.compare([good], "auto").mean() < MEAN_LEVELS


def test_pixels_do_not_cross_the_bus(served):
    """Of photographs that the GPU decodes only the table of images goes there; results come back."""
    if "decoding with nvimagecodec" not in served.lane.server.log():
        pytest.skip("nvImageCodec does not decode on this GPU")
    files = [photo.read_bytes() for photo in PHOTOS]
    ask(served.client, files, "auto")
    before = served.lane.work("auto")
    ask(served.client, files, "auto")
    after = served.lane.work("auto")
    spent = {key: after[key] - before[key] for key in after}
    assert spent["h2d", "copied_bytes"] <= 112 * len(files)
    assert spent["d2h", "copied_bytes"] == len(files) * 3 * 224 * 224
    assert spent["d2d", "copied_bytes"] == 0
