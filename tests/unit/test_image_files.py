"""Recognition of images by image_preproc, and its refusals of hostile files."""

import io
import resource
import warnings

import numpy as np
import pytest
from PIL import Image

from gpubridge.backends.image_preproc.host_path import make_decoder
from gpubridge.backends.image_preproc.image_files import (
    ImageError,
    jpeg_is_whole,
    require_format,
    require_plain_jpeg,
    webp_size,
)
from tests.image_corpus import GOOD_FILES, HOSTILE_FILES, encoded, xmp
from tests.photos import PHOTO, as_jpeg, upright_rgb


@pytest.fixture(params=["pillow", pytest.param("nvimagecodec", marks=pytest.mark.extra)])
def decoder(request):
    if request.param == "nvimagecodec":
        pytest.importorskip("nvidia.nvimgcodec")
    return make_decoder(request.param, max_pixels=50_000_000)


@pytest.mark.parametrize("name", GOOD_FILES)
def test_a_good_file_has_the_pixels_that_pillow_gives_it(decoder, name):
    expected = upright_rgb(GOOD_FILES[name])
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


def test_scans_are_counted_until_the_end_of_the_image():
    progressive = GOOD_FILES["jpeg-progressive"]
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    scans = progressive.count(b"\xff\xda")
    most = progressive[:-2] + scan * (200 - scans) + progressive[-2:]
    require_plain_jpeg(most + scan * 9, 50_000_000)
    # Filling, restarts and stuffing within scans are no segments, and hide none.
    more = most[:-2] + b"\xff\xd0\xff\0\xff" + scan + most[-2:]
    with pytest.raises(ImageError, match="at most 200 scans in a JPEG file of that size, got more"):
        require_plain_jpeg(more, 50_000_000)
    assert not jpeg_is_whole(most[:-2])
    assert jpeg_is_whole(more)


@pytest.mark.parametrize(("larger", "most"), [(1, 20), (1.5, 30), (9.5, 190), (1000, 200)])
def test_scans_are_fewer_in_larger_images(larger, most):
    progressive = encoded(Image.new("RGB", (500, 200)), "JPEG", progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    whole = progressive[:-2] + scan * (most - progressive.count(b"\xff\xda"))
    require_plain_jpeg(whole + progressive[-2:], int(500 * 200 * larger))
    with pytest.raises(ImageError, match=f"at most {most} scans"):
        require_plain_jpeg(whole + scan + progressive[-2:], int(500 * 200 * larger))


def test_of_a_frame_that_is_all_in_one_scan_no_more_is_read():
    """Every byte of it: that takes longer than all else that is asked of a file's start."""
    baseline = GOOD_FILES["jpeg-baseline"]
    require_plain_jpeg(baseline[:-2] + baseline[baseline.index(b"\xff\xda") : -2] * 300, 50_000_000)


def test_white_is_zero_with_16_bits_as_with_8():
    levels = np.arange(0, 65536, 256, dtype=np.uint16)
    gray = encoded(Image.fromarray(levels.reshape(16, 16)), "TIFF", tiffinfo={262: 0})
    decoded = np.asarray(make_decoder("pillow", 1000).decode(gray).stored)
    np.testing.assert_array_equal(decoded[..., 0].ravel(), np.arange(255, -1, -1))


def test_orientation_is_that_of_exif_alone():
    """A resolution in EXIF makes Pillow read all of the metadata when it opens the file."""
    tags = Image.Exif()
    tags[0x011A] = 72.0
    jpeg = as_jpeg(Image.new("RGB", (8, 4)), exif=tags.tobytes(), xmp=xmp(6))
    assert Image.open(io.BytesIO(jpeg)).getexif()[0x0112] == 6
    assert make_decoder("pillow", 1000).decode(jpeg).upright().size == (8, 4)
