"""Recognition of images by image_preproc, and its refusals of hostile files."""

from __future__ import annotations

import io
import resource
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from gpubridge.backends.image_preproc.host_path import make_decoder
from gpubridge.backends.image_preproc.image_files import (
    ImageError,
    jpeg_is_whole,
    require_few_scans,
    require_format,
    webp_size,
)
from tests.image_corpus import GOOD_FILES, HOSTILE_FILES
from tests.photos import PHOTO, as_jpeg


@pytest.fixture(params=["pillow", pytest.param("nvimagecodec", marks=pytest.mark.extra)])
def decoder(request):
    if request.param == "nvimagecodec":
        pytest.importorskip("nvidia.nvimgcodec")
    return make_decoder(request.param, max_pixels=50_000_000)


@pytest.mark.parametrize("name", GOOD_FILES)
def test_a_good_file_has_the_pixels_that_pillow_gives_it(decoder, name):
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(GOOD_FILES[name]))).convert("RGB")
    decoded = decoder.decode(GOOD_FILES[name]).upright()
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_hostile_file_is_refused_with_the_reason(decoder, name):
    encoded, message = HOSTILE_FILES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if message is None:
            try:
                decoder.decode(encoded)
            except ImageError:
                pass
        else:
            with pytest.raises(ImageError, match=message):
                decoder.decode(encoded)


def test_no_memory_is_taken_for_bombs():
    decoder = make_decoder("pillow", max_pixels=1_000_000)
    bombs = [file for file, message in HOSTILE_FILES.values() if message and "at most" in message]
    assert len(bombs) >= 6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        with pytest.raises(ImageError, match="at most"):
            decoder.decode(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (PHOTO, None),
        (GOOD_FILES["png-rgb"], None),
        (GOOD_FILES["webp-lossy"], "expected a JPEG or PNG file, got WebP; convert the file, or"),
        (b"x", "expected a JPEG or PNG file, got 1 bytes starting 78"),
    ],
)
def test_formats_may_be_restricted(file, message):
    decoder = make_decoder("pillow", 10**8, ("JPEG", "PNG"))
    if message is None:
        decoder.decode(file)
    else:
        with pytest.raises(ImageError, match=message):
            decoder.decode(file)


@pytest.mark.parametrize("name", GOOD_FILES)
def test_formats_are_known_by_their_first_bytes(name):
    found = require_format(GOOD_FILES[name], ("JPEG", "PNG", "WebP", "TIFF"))
    assert found.lower() == name.split("-")[0]


@pytest.mark.parametrize("name", [name for name in GOOD_FILES if name.startswith("webp")])
def test_the_size_of_a_webp_file_is_read_from_its_start(name):
    assert webp_size(GOOD_FILES[name]) == Image.open(io.BytesIO(GOOD_FILES[name])).size


def test_the_end_of_a_thumbnail_is_not_the_end_of_a_jpeg():
    thumbnail = as_jpeg(Image.new("RGB", (8, 8)))
    block = b"Exif\0\0" + thumbnail
    jpeg = PHOTO[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + PHOTO[2:]
    assert jpeg_is_whole(jpeg)
    assert jpeg_is_whole(jpeg + b"behind it")
    assert not jpeg_is_whole(jpeg[:-2000])
    for name in GOOD_FILES:
        assert jpeg_is_whole(GOOD_FILES[name]) == name.startswith("jpeg")


def test_only_jpegs_that_may_have_many_scans_are_searched_for_them():
    """Every byte of it: that takes longer than all else that is asked of a file's start."""
    baseline = GOOD_FILES["jpeg-baseline"]
    require_few_scans(baseline + b"\xff\xda" * 1000)
    with pytest.raises(ImageError, match="at most 200 scans in a JPEG file, got 1001"):
        require_few_scans(baseline.replace(b"\xff\xc0", b"\xff\xc2") + b"\xff\xda" * 1000)
    endless = baseline[:2] + b"\xff\xfe\0\2" * 5000 + baseline[2:]
    assert not jpeg_is_whole(endless)
    require_few_scans(endless)
