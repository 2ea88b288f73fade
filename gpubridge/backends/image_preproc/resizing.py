"""Which part of an image goes where: planned from its size alone, the same for CPU and GPU.

`plan_resize` decides; `resize_on_host` and the GPU's kernel (`fused_kernel`) carry it out, in one
antialiased pass, with the same levels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from PIL import Image

from gpubridge.backends.image_preproc.settings import Settings

__all__ = ["Box", "ResizePlan", "plan_resize", "resize_on_host", "source_box"]

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


class ResizePlan(NamedTuple):
    """What is done to one image.

    Attributes
    ----------
    box : Box
        The part of the upright source that is resized.
    left, top, width, height : int
        The part of the output that it becomes; what lies outside is padding.
    down_first : bool
        Whether the columns are resized before the rows. Levels are rounded in between, so that the
        order shows.
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


def plan_resize(width: int, height: int, settings: Settings) -> ResizePlan:
    """Plan an upright image of this size, by the settings' RESIZE_MODE.

    Of a crop only the pixels that are kept are computed: resizing everything first would let an
    image of one by a million pixels ask for gigabytes.
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
    # Pillow looks at the whole image there, not at the box.
    taller = height > inner_height and height - inner_height > 2 * (width - inner_width)
    return ResizePlan(
        box, left, top, inner_width, inner_height, taller and _tall_images_go_down_first()
    )


@lru_cache
def _tall_images_go_down_first() -> bool:
    """Tell which of Pillow's ways this one has: older ones resize all images across first."""
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
