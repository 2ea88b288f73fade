"""Resizing of images: planned from the size alone, the same for CPU and GPU.

`resize_on_host` and the GPU's kernel (`kernels.DeviceKernel`) execute the plan of `plan_resize` in one
antialiased pass, with the same levels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpubridge.backends.image_preproc.settings import Settings

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

_LEVELS = 256


class Box(NamedTuple):
    """A rectangle of the source image, in its pixels; the corners may fall between two."""

    left: float
    top: float
    right: float
    bottom: float


class ResizePlan(NamedTuple):
    """Mapping of a part (``box``) of an upright source to a part of a padded output.

    ``down_first``: whether the columns are resized before the rows. Levels are rounded in between, so
    that the order matters.
    """

    box: Box
    left: int
    top: int
    width: int
    height: int
    down_first: bool


def source_box(
    width: int, height: int, shorter_side: int, crop_width: int, crop_height: int
) -> Box:
    """Return the part of a `width` x `height` image that resizing and a centre crop keep.

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


def plan_resize(width: int, height: int, settings: Settings) -> ResizePlan:
    """Plan an upright image of this size, by the settings' RESIZE_MODE.

    Only the pixels of a crop are computed: resizing everything first would let an image of one by a
    million pixels take gigabytes.
    """
    box = Box(0, 0, width, height)
    left, top, inner_width, inner_height = 0, 0, settings.width, settings.height
    if settings.resize_mode == "crop":
        box = source_box(width, height, settings.shorter_side, inner_width, inner_height)
    elif settings.resize_mode == "pad":
        scale = min(settings.width / width, settings.height / height)
        inner_width = min(settings.width, max(1, round(width * scale)))
        inner_height = min(settings.height, max(1, round(height * scale)))
        left, top = (settings.width - inner_width) // 2, (settings.height - inner_height) // 2
    # Pillow decides by the whole image, not by the box.
    taller = height > inner_height and height - inner_height > 2 * (width - inner_width)
    return ResizePlan(
        box, left, top, inner_width, inner_height, taller and _tall_images_go_down_first()
    )


@lru_cache
def _tall_images_go_down_first() -> bool:
    """Return whether this Pillow resizes tall images by columns first; older ones never do."""
    stripes = Image.frombytes("L", (4, 64), bytes(37 * i % 251 for i in range(256)))
    way = Image.Resampling.BICUBIC
    return stripes.resize((3, 5), way) == stripes.resize((4, 5), way).resize((3, 5), way)


def resize_on_host(image: Image.Image, settings: Settings) -> Image.Image:
    """Return the upright RGB `image` in the size of the settings."""
    plan = plan_resize(image.width, image.height, settings)
    resized = image.resize(
        (plan.width, plan.height), _FILTERS[settings.interpolation], box=plan.box
    )
    size = settings.width, settings.height
    if resized.size == size:
        return resized
    red, green, blue = settings.pad_levels
    padded = Image.new("RGB", size, (red, green, blue))
    padded.paste(resized, (plan.left, plan.top))
    return padded


class Normalization:
    """``(value / 255 - mean) / std`` per channel, as one multiplication and one addition.

    Both are computed in FP32; FP16 and BF16 are rounded from that, once. UINT8 values are unchanged.
    """

    def __init__(self, settings: Settings) -> None:
        self._datatype = settings.dtype
        self.element_bytes = {"FP32": 4, "FP16": 2, "BF16": 2, "UINT8": 1}[settings.dtype]
        self._channels_first = settings.layout == "NCHW"
        spread = np.asarray(settings.std)
        self._scale = (1 / (255 * spread)).astype(np.float32)
        self._offset = (-np.asarray(settings.mean) / spread).astype(np.float32)

    def write(self, image: Image.Image, pixels: npt.NDArray[Any]) -> None:
        """Write the RGB `image` into `pixels`, of the settings' type and layout."""
        source = np.asarray(image)
        scale, offset = self._scale, self._offset
        if self._channels_first:
            source = source.transpose(2, 0, 1)
            scale, offset = scale[:, None, None], offset[:, None, None]
        if self._datatype == "UINT8":
            pixels[...] = source
        elif self._datatype == "FP32":
            np.multiply(source, scale, out=pixels)
            pixels += offset
        else:
            pixels[...] = source * scale + offset

    def levels(self) -> npt.NDArray[np.uint32]:
        """Return the normalised value of each level of each channel, as the bits of the output's type.

        Returns uint32 ``[3, 256]``, with the value in the low `element_bytes` of each. A GPU that looks
        values up here writes the same as `write`.
        """
        levels = np.arange(_LEVELS, dtype=np.uint8)
        if self._datatype == "UINT8":
            return np.tile(levels.astype(np.uint32), (3, 1))
        values = levels[None, :] * self._scale[:, None] + self._offset[:, None]
        bits: npt.NDArray[np.uint32] = values.view(np.uint32)
        if self._datatype == "BF16":
            # To the nearest, ties to even: NumPy alone has no BF16. No value is NaN or infinite.
            odd = np.right_shift(bits, np.uint32(16)) & np.uint32(1)
            bits = np.right_shift(bits + np.uint32(0x7FFF) + odd, np.uint32(16))
        elif self._datatype == "FP16":
            bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return bits
