"""Resize an image and crop, stretch or pad it, in one antialiased pass."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image

from gpubridge.backends.image_preproc.settings import Settings

__all__ = ["Box", "fit", "source_box"]

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


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


def fit(image: Image.Image, settings: Settings) -> Image.Image:
    """Return `image` in the size of the settings, by their RESIZE_MODE.

    Of a crop only the pixels that are kept are computed: resizing everything first would let an
    image of one by a million pixels ask for gigabytes.
    """
    size = settings.width, settings.height
    resample = _FILTERS[settings.interpolation]
    if settings.resize_mode == "stretch":
        return image.resize(size, resample)
    if settings.resize_mode == "crop":
        box = source_box(image.width, image.height, settings.shorter_side, *size)
        return image.resize(size, resample, box=box)
    scale = min(settings.width / image.width, settings.height / image.height)
    width = min(settings.width, max(1, round(image.width * scale)))
    height = min(settings.height, max(1, round(image.height * scale)))
    red, green, blue = (round(value) for value in settings.pad_color)
    padded = Image.new("RGB", size, (red, green, blue))
    corner = (settings.width - width) // 2, (settings.height - height) // 2
    padded.paste(image.resize((width, height), resample), corner)
    return padded
