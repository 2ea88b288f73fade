"""Damaged image files are refused, whatever is damaged; images of any size have Pillow's levels."""

import warnings

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from PIL import Image

from gpubridge.backends.image_preproc.host_path import ImageError, make_decoder
from gpubridge.backends.image_preproc.image_files import jpeg_is_whole, webp_size
from gpubridge.backends.image_preproc.resizing import resize_on_host
from tests.fuzz.budget import fuzzed, mutations
from tests.host_kernel.running import run_kernel, source_of
from tests.image_corpus import GOOD_FILES
from tests.image_settings import image_settings

FILES = mutations(st.sampled_from([GOOD_FILES[name] for name in sorted(GOOD_FILES)]))


@pytest.mark.parametrize("name", ["pillow", pytest.param("nvimagecodec", marks=pytest.mark.extra)])
@fuzzed()
@given(encoded=FILES | st.binary(max_size=200))
def test_a_damaged_file_is_decoded_or_refused(name, encoded):
    if name == "nvimagecodec":
        pytest.importorskip("nvidia.nvimgcodec")
    decoder = make_decoder(name, max_pixels=100_000)
    webp_size(encoded)
    jpeg_is_whole(encoded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = decoder.decode(encoded).upright()
        except ImageError as error:
            assert str(error).startswith("expected ")  # noqa: PT017
        else:
            assert image.mode == "RGB"
            assert image.width * image.height <= 100_000


@fuzzed()
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    target=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    mode=st.sampled_from(["crop", "stretch", "pad"]),
    interpolation=st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
    seed=st.integers(0, 99),
)
@example((300, 1), (70, 70), "stretch", "lanczos", 0)
@example((1, 300), (1, 70), "pad", "bicubic", 0)
def test_the_kernel_has_pillows_levels(size, target, mode, interpolation, seed):
    settings = image_settings(
        SIZE=f"{target[0]}, {target[1]}",
        DTYPE="UINT8",
        LAYOUT="NHWC",
        RESIZE_MODE=mode,
        INTERPOLATION=interpolation,
    )
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    expected = np.asarray(resize_on_host(Image.fromarray(pixels), settings))
    np.testing.assert_array_equal(run_kernel([source_of(pixels)], settings)[0], expected)
