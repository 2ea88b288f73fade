"""Photographs, good and bad, and what a vision library makes of them."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

__all__ = [
    "BAD_IMAGES",
    "ONE_LEVEL",
    "PHOTO",
    "PHOTOS",
    "as_jpeg",
    "claiming",
    "reference",
    "upright_rgb",
]

_IMAGES = Path(__file__).parents[1] / "examples" / "image_preproc" / "images"
PHOTOS = sorted(_IMAGES.glob("*.jpg"))


def reference(jpeg):
    """Preprocess a photograph as a vision library does: resize all of it, crop, normalise."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB")
    shorter = min(image.size)
    width, height = (256 * side // shorter for side in image.size)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    return ((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).transpose(2, 0, 1)


def upright_rgb(encoded):
    """Decode a file as the backend promises: turned as EXIF says, the upper 8 bits of gray levels."""
    image = Image.open(io.BytesIO(encoded))
    for xmp in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(xmp, None)
    turned = ImageOps.exif_transpose(image)
    if turned.mode == "I;16":
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    return turned.convert("RGB")


ONE_LEVEL = 1 / 255 / 0.224 + 1e-5  # the widest that one 8-bit step is after normalising


def as_jpeg(image, **options):
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", **options)
    return encoded.getvalue()


def claiming(jpeg, width, height):
    """The same file with another size in its frame header: a decompression bomb."""
    patched = bytearray(jpeg)
    size_at = patched.index(b"\xff\xc0") + 5
    patched[size_at : size_at + 4] = struct.pack(">HH", height, width)
    return bytes(patched)


PHOTO = (_IMAGES / "rocket.jpg").read_bytes()
BAD_IMAGES = [
    pytest.param(b"", "expected a JPEG, PNG, WebP or TIFF file, got 0 bytes in all", id="empty"),
    pytest.param(b"\x89GIF89a\n", "got 8 bytes starting 89 47 49 46", id="not an image"),
    pytest.param(PHOTO[:100], "got 100 bytes that are truncated or damaged", id="header only"),
    pytest.param(PHOTO[: len(PHOTO) // 2], "truncated or damaged", id="truncated"),
    pytest.param(
        claiming(PHOTO, 65000, 65000),
        "at most 50000000 pixels, got 65000 x 65000 = 4225000000",
        id="decompression bomb",
    ),
]
