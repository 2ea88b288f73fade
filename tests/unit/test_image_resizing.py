"""The pixels of image_preproc are those of torchvision on a Pillow image, as the documents say how nearly."""

import functools
import io
import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from gpubridge.backends.image_preproc.host_path import PillowDecoder
from gpubridge.backends.image_preproc.resizing import _goes_down_first, plan_resize, resize_on_host
from tests.host_kernel.running import run_kernel, source_of
from tests.image_corpus import encoded, exif
from tests.image_settings import image_settings

FILTERS = {
    name: Image.Resampling[name.upper()] for name in ("nearest", "bilinear", "bicubic", "lanczos")
}
MODES = ("crop", "stretch", "pad")
#: Levels that differ at most, by filter and mode; the page has the same table.
TABLE = {"nearest": (0, 0, 0), "bilinear": (1, 0, 0), "bicubic": (1, 0, 0), "lanczos": (1, 0, 0)}
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "image-preprocessing.md"
SIZES = [
    (640, 427),
    (427, 640),
    (190, 1339),  # columns first if all of it is resized, rows first of the crop alone
    (163, 651),  # and the other way
    (1339, 190),
    (380, 2100),  # 9 outputs for 10 pixels: many levels lie just between two
    (1408, 1090),  # many centres of outputs lie just between two pixels
    (1200, 1000),
    (224, 224),
    (50, 40),
    (1, 9),
]
SHAPES = [
    {"SIZE": "224", "RESIZE_SHORTER_SIDE": "256"},
    {"SIZE": "299", "RESIZE_SHORTER_SIDE": "342"},
    {"SIZE": "20, 224", "RESIZE_SHORTER_SIDE": "256"},
    {"SIZE": "224, 20", "RESIZE_SHORTER_SIDE": "224"},
]


@functools.cache
def noise(width, height):
    levels = np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


def levels(mode, interpolation, **values):
    values = {"DTYPE": "UINT8", "LAYOUT": "NHWC", "RESIZE_MODE": mode, **values}
    if mode != "crop":
        values.pop("RESIZE_SHORTER_SIDE", None)
    return image_settings(INTERPOLATION=interpolation, **values)


def by_torchvision(image, settings):
    """What torchvision's Resize and CenterCrop do to a Pillow image: by Pillow, all of it, then a crop."""
    way, size = FILTERS[settings.interpolation], (settings.width, settings.height)
    if settings.resize_mode == "stretch":
        return image.resize(size, way)
    if settings.resize_mode == "pad":
        scale = min(settings.width / image.width, settings.height / image.height)
        width, height = (max(1, round(side * scale)) for side in image.size)
        padded = Image.new("RGB", size)
        place = (settings.width - width) // 2, (settings.height - height) // 2
        padded.paste(image.resize((width, height), way), place)
        return padded
    short = settings.shorter_side
    longer = int(short * max(image.size) / min(image.size))
    resized = (short, longer) if image.width <= image.height else (longer, short)
    left, top = (round((had - kept) / 2.0) for had, kept in zip(resized, size, strict=True))
    return image.resize(resized, way).crop((left, top, left + size[0], top + size[1]))


def most_apart(made, expected):
    return int(np.abs(np.asarray(made).astype(int) - np.asarray(expected)).max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interpolation", FILTERS)
def test_pixels_are_those_of_torchvision(interpolation, mode):
    for number, size in enumerate(SIZES):
        image = noise(*size)
        # Each size with each of the shapes, by some filter and mode.
        shape = SHAPES[(number + MODES.index(mode) + list(FILTERS).index(interpolation)) % 4]
        settings = levels(mode, interpolation, **shape)
        apart = most_apart(resize_on_host(image, settings), by_torchvision(image, settings))
        assert apart <= TABLE[interpolation][MODES.index(mode)], (size, shape)


def test_the_page_has_the_table():
    page = PAGE.read_text()
    assert f"| `INTERPOLATION` | {' | '.join(f'`{mode}`' for mode in MODES)} |" in page
    for interpolation, row in TABLE.items():
        words = " | ".join("one level" if most else "equal" for most in row)
        assert f"| `{interpolation}` | {words} |" in page


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["crop", "stretch"])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_torchvision_works_as_these_tests_say(interpolation, mode):
    torchvision = pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    way = torchvision.transforms.InterpolationMode(interpolation)
    for size in SIZES:
        for shape in SHAPES:
            settings = levels(mode, interpolation, **shape)
            wanted = settings.height, settings.width
            whole = v2.Resize(settings.shorter_side if mode == "crop" else wanted, way)
            made = v2.CenterCrop(wanted)(whole(noise(*size)))
            assert most_apart(made, by_torchvision(noise(*size), settings)) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_with_every_filter_and_mode_on_both_paths(orientation):
    stored = noise(61, 43)
    file = encoded(stored, "PNG", exif=exif(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    decoded = PillowDecoder(10**6).decode(file)
    pixels = np.asarray(stored)
    for interpolation in FILTERS:
        for mode, most in zip(MODES, TABLE[interpolation], strict=True):
            settings = levels(mode, interpolation, SIZE="12, 40", RESIZE_SHORTER_SIDE="47")
            made = resize_on_host(decoded.upright(), settings)
            assert most_apart(made, by_torchvision(upright, settings)) <= most, (
                interpolation,
                mode,
            )
            on_device = run_kernel([source_of(pixels, orientation)], settings)[0]
            np.testing.assert_array_equal(on_device, np.asarray(made))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(
    ("size", "shape", "shorter", "whole", "one_call"),
    [
        ((1000, 2100), "64", 81, True, True),
        ((100, 190), "64", 81, False, True),  # of a part Pillow has the order of the whole
        (
            (71, 830),
            "64",
            81,
            False,
            False,
        ),  # also of a part another: its passes are run one by one
        ((1009, 2021), "24, 10", 300, False, False),  # columns first
    ],
)
def test_crops_whose_passes_pillow_would_order_otherwise(
    interpolation, size, shape, shorter, whole, one_call
):
    settings = levels("crop", interpolation, SIZE=shape, RESIZE_SHORTER_SIDE=str(shorter))
    plan = plan_resize(*size, settings)
    if interpolation != "nearest":
        # They are what they are said to be, with a Pillow that orders passes.
        assert (plan.part == (0, 0, *size)) == whole
        assert (
            _goes_down_first(plan.part, plan.x.length, plan.y.length) == plan.down_first
        ) == one_call
    image = noise(*size)
    pixels = np.asarray(image)
    made = run_kernel([source_of(pixels)], settings)[0]
    np.testing.assert_array_equal(made, np.asarray(resize_on_host(image, settings)))
    assert most_apart(made, by_torchvision(image, settings)) <= TABLE[interpolation][0]


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(1, 3_000_000), (3_000_000, 1)])
def test_the_crop_of_a_long_image_takes_no_memory_for_the_rest(size, interpolation):
    settings = levels("crop", interpolation, SIZE="64")
    image = noise(*size)
    pixels = np.asarray(image)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = np.asarray(resize_on_host(image, settings))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    np.testing.assert_array_equal(run_kernel([source_of(pixels)], settings)[0], made)
