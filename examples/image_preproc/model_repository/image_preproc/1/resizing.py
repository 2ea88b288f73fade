"""Resize the shorter side and crop the centre, in one antialiased pass."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image


class Box(NamedTuple):
    """A rectangle of the source image, in its pixels; the corners may fall between two."""

    left: float
    top: float
    right: float
    bottom: float


def source_box(
    width: int, height: int, shorter_side: int, crop_width: int, crop_height: int
) -> Box:
    """Return what of a `width` x `height` image is left after resizing it and cropping the centre.

    The integer steps (the longer side rounded down, the crop's corner rounded to the nearest) are
    those of torchvision's ``Resize(shorter_side)`` and ``CenterCrop``.
    """
    if width <= height:
        resized_width, resized_height = shorter_side, shorter_side * height // width
    else:
        resized_width, resized_height = shorter_side * width // height, shorter_side
    left = round((resized_width - crop_width) / 2)
    top = round((resized_height - crop_height) / 2)
    to_source_x, to_source_y = width / resized_width, height / resized_height
    return Box(
        left * to_source_x,
        top * to_source_y,
        (left + crop_width) * to_source_x,
        (top + crop_height) * to_source_y,
    )


def resize_and_crop(
    image: Image.Image, shorter_side: int, crop_width: int, crop_height: int
) -> Image.Image:
    """Return the centre crop of `image`, resized bilinearly with antialiasing.

    Only the pixels that are kept are computed: resizing everything first would let an image of
    one by a million pixels ask for gigabytes.
    """
    box = source_box(image.width, image.height, shorter_side, crop_width, crop_height)
    return image.resize((crop_width, crop_height), Image.Resampling.BILINEAR, box=box)
