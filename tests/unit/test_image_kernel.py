"""The kernel of image_preproc, its own source run on a processor: its levels are Pillow's."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from gpubridge.backends.image_preproc.resizing import Normalization, resize_on_host
from tests.host_kernel.running import run_kernel, source_of
from tests.image_settings import image_settings
from tests.photos import PHOTOS
from tests.unit.guarded_pages import guarded_pages

FILTERS = ["nearest", "bilinear", "bicubic", "lanczos"]
MODES = ["crop", "stretch", "pad"]
SIZES = [
    (1, 1),
    (1, 9),
    (33, 2),
    (50, 40),
    (75, 60),
    (224, 224),
    (320, 213),
    (129, 1999),
    (999, 31),
]


def noise(width, height, seed=7):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def levels(**values):
    """Settings with which the output is the levels themselves."""
    return image_settings(**{"DTYPE": "UINT8", "LAYOUT": "NHWC", "SIZE": "60, 75", **values})


def by_pillow(pixels, settings):
    return np.asarray(resize_on_host(Image.fromarray(pixels), settings))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interpolation", FILTERS)
def test_levels_are_pillows(interpolation, mode):
    settings = levels(RESIZE_MODE=mode, INTERPOLATION=interpolation)
    for size in SIZES:
        pixels = noise(*size)
        made = run_kernel([source_of(pixels)], settings)[0]
        np.testing.assert_array_equal(made, by_pillow(pixels, settings), str(size))


@pytest.mark.parametrize("quads", [8, 16])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_gpus_with_less_shared_memory_make_the_same_levels(interpolation, quads):
    settings = levels(INTERPOLATION=interpolation)
    # The last one needs more weights of an output than a step has, the first one fewer.
    for size in [(50, 40), (320, 213), (129, 1999), (1999, 129), (2900, 60)]:
        pixels = noise(*size)
        made = run_kernel([source_of(pixels)], settings, quads)[0]
        np.testing.assert_array_equal(made, by_pillow(pixels, settings), str(size))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (1100, 800, "5, 7"),  # more weights of an output than fit into the kernel's table
        (3, 40000, "40, 3"),
        (40000, 3, "3, 40"),
        (2, 2, "130, 170"),
    ],
)
def test_extreme_sizes(width, height, size, interpolation):
    settings = levels(SIZE=size, RESIZE_MODE="stretch", INTERPOLATION=interpolation)
    pixels = noise(width, height)
    np.testing.assert_array_equal(
        run_kernel([source_of(pixels)], settings)[0], by_pillow(pixels, settings)
    )


@pytest.mark.nightly
def test_a_photograph_of_48_million_pixels():
    settings = levels(SIZE="24, 32", INTERPOLATION="bicubic")
    rows = noise(8000, 60)
    pixels = np.lib.stride_tricks.as_strided(rows, (100, 60, 8000, 3), (0, *rows.strides))
    pixels = pixels.reshape(6000, 8000, 3)
    np.testing.assert_array_equal(
        run_kernel([source_of(pixels)], settings)[0], by_pillow(pixels, settings)
    )


@pytest.mark.parametrize("photo", PHOTOS[:3], ids=lambda photo: photo.stem)
def test_photographs(photo):
    image = ImageOps.exif_transpose(Image.open(photo)).convert("RGB")
    settings = levels(SIZE="224")
    pixels = np.ascontiguousarray(image)
    np.testing.assert_array_equal(
        run_kernel([source_of(pixels)], settings)[0], by_pillow(pixels, settings)
    )


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["FP32", "FP16", "BF16", "UINT8"])
def test_types_and_layouts_are_those_of_the_cpu_path_bit_for_bit(dtype, layout):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    settings = image_settings(
        SIZE="37, 45", DTYPE=dtype, LAYOUT=layout, RESIZE_MODE="pad", PAD_COLOR="9, 120, 250"
    )
    sources = [noise(61, 23), noise(20, 90)]  # the second goes down first
    made = run_kernel([source_of(pixels) for pixels in sources], settings)
    numpy_type = {"BF16": ml_dtypes.bfloat16, "FP16": np.float16, "FP32": np.float32}.get(dtype)
    expected = np.empty((2, *settings.image_shape), numpy_type or np.uint8)
    for pixels, output in zip(sources, expected, strict=True):
        image = resize_on_host(Image.fromarray(pixels), settings)
        Normalization(settings).write(image, output)
    np.testing.assert_array_equal(made, expected.view(made.dtype))


def test_images_of_one_launch_do_not_disturb_each_other():
    settings = levels()
    sources = [noise(*size, seed=seed) for seed, size in enumerate(SIZES)]
    together = run_kernel([source_of(pixels) for pixels in sources], settings)
    for pixels, made in zip(sources, together, strict=True):
        np.testing.assert_array_equal(made, by_pillow(pixels, settings))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_exif_says(orientation):
    pixels = noise(83, 47)
    turned = Image.fromarray(pixels)
    turned.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(turned))
    settings = levels(RESIZE_MODE="stretch")
    made = run_kernel([source_of(pixels, orientation)], settings)[0]
    np.testing.assert_array_equal(made, by_pillow(upright, settings))


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize(("width", "pad"), [(36, 0), (37, 0), (37, 5)])
def test_nothing_is_read_beside_the_pixels(width, pad, orientation):
    """The pixels end where a page without access begins; then they begin where one ends."""
    height = 21
    pitch = 3 * width + pad
    nbytes = pitch * (height - 1) + 3 * width
    pixels = noise(width, height)
    settings = levels(RESIZE_MODE="stretch")
    expected = run_kernel([source_of(pixels, orientation)], settings)
    with guarded_pages() as (memory, page):
        ends = [2 * page - nbytes - start for start in range(4)]
        for at in (*ends, *range(page, page + 4)):
            place = np.frombuffer(memory, np.uint8, nbytes, at)
            rows = np.lib.stride_tricks.as_strided(place, pixels.shape, (pitch, 3, 1))
            rows[...] = pixels
            made = run_kernel([source_of(rows, orientation)], settings)
            np.testing.assert_array_equal(made, expected)
            del place, rows
