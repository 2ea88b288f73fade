"""Resizing of images: planned from the size alone, the same for CPU and GPU.

`resize_on_host` and the GPU's kernel (`kernels.DeviceKernel`) execute the plan of `plan_resize` in one
antialiased pass, with the same levels.
"""

from __future__ import annotations

import math
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
_WIDEST_SUPPORT = 3
"""Of the filters, lanczos, in pixels of the side that has fewer."""
_MOST_MORE = 64
"""Outputs more than those of a crop that are made for exact edges, of an image that shrinks."""
_MOST_STEPS = 1 << 20
"""Outputs before a crop whose steps are added one by one; more have no image that was resized whole."""


class Axis(NamedTuple):
    """One axis of a resize: output ``i`` of ``length`` is centred at ``start + (i + 0.5) * step``.

    - ``start``, ``end``: the edges of what is resized, in pixels of the part; Pillow has them in single
      precision.
    - ``at``: where the outputs begin in a padded image.
    """

    start: float
    end: float
    step: float
    at: int
    length: int


class Part(NamedTuple):
    """A rectangle of whole pixels of the source."""

    left: int
    top: int
    width: int
    height: int


class ResizePlan(NamedTuple):
    """Mapping of a ``part`` of an upright source to a part of a padded output, in one antialiased pass.

    ``down_first``: whether the columns are resized before the rows. Levels are rounded in between, so
    that the order matters. The nearest pixel has no such order.
    """

    part: Part
    x: Axis
    y: Axis
    down_first: bool


def plan_resize(width: int, height: int, settings: Settings) -> ResizePlan:
    """Plan an upright image of this size, by the settings' RESIZE_MODE.

    Only the pixels of a crop are computed: resizing everything first would let an image of one by a
    million pixels take gigabytes. They are those of the whole image, resized with Pillow.
    """
    whole = Part(0, 0, width, height)
    inner_width, inner_height = settings.width, settings.height
    if settings.resize_mode == "crop":
        return _plan_crop(whole, settings)
    if settings.resize_mode == "pad":
        scale = min(settings.width / width, settings.height / height)
        inner_width = min(settings.width, max(1, round(width * scale)))
        inner_height = min(settings.height, max(1, round(height * scale)))
    return ResizePlan(
        whole,
        _axis(0, width, (settings.width - inner_width) // 2, inner_width),
        _axis(0, height, (settings.height - inner_height) // 2, inner_height),
        _goes_down_first(whole, inner_width, inner_height),
    )


def _plan_crop(whole: Part, settings: Settings) -> ResizePlan:
    """Plan the crop of a resized image.

    The integer steps (the longer side rounded down, the crop's corner rounded to the nearest) are
    those of torchvision's ``Resize(RESIZE_SHORTER_SIDE)`` and ``CenterCrop``.
    """
    shorter = settings.shorter_side
    if whole.width <= whole.height:
        resized_width, resized_height = shorter, shorter * whole.height // whole.width
    else:
        resized_width, resized_height = shorter * whole.width // whole.height, shorter
    nearest = settings.interpolation == "nearest"
    kept = _kept_nearest if nearest else _kept
    x = kept(whole.width, resized_width, settings.width)
    y = kept(whole.height, resized_height, settings.height)
    down_first = not nearest and _goes_down_first(whole, resized_width, resized_height)
    if nearest or _goes_down_first(whole, x.length, y.length) == down_first:
        return ResizePlan(whole, x, y, down_first)
    # Of a part, Pillow decides otherwise, or its passes can be run one by one without much waste.
    left, x_end = _sources(x, whole.width)
    top, y_end = _sources(y, whole.height)
    part = Part(left, top, x_end - left, y_end - top)
    return ResizePlan(part, _shifted(x, left), _shifted(y, top), down_first)


def _kept(size: int, resized: int, kept: int) -> Axis:
    """Return the axis of the middle ``kept`` of ``resized`` outputs, by Pillow's box.

    Some outputs more may be made, up to all, so that the edges are exact in single precision. In a
    regular pattern (9 outputs for 10 pixels) many levels lie just between two, where any error shows.
    """
    begin = first = round((resized - kept) / 2)
    end = begin + kept
    period = resized // math.gcd(size, resized)
    # Multiples of it have edges with few binary places.
    odd = period // (period & -period)
    exact = first // odd * odd, -(-end // odd) * odd
    # Outputs are cheap where an image grows: each has few sources.
    most = _MOST_MORE if size > resized else 8 * _MOST_MORE
    if exact[1] - exact[0] - kept <= most:
        begin, end = exact
    scale = size / resized
    return _axis(begin * scale, end * scale, begin - first, end - begin)


def _kept_nearest(size: int, resized: int, kept: int) -> Axis:
    """Return the axis of the middle ``kept`` of ``resized`` outputs, each its nearest pixel.

    Where centres fall between two pixels, as with sides of 6 and 5 pixels, rounding decides. Pillow adds
    the step for each output before; a box would round otherwise.
    """
    first = round((resized - kept) / 2)
    step = float(np.float32(size)) / resized
    if first > _MOST_STEPS:
        centre = (first + 0.5) * step
    else:
        steps = np.full(first + 1, step)
        steps[0] = step * 0.5
        centre = float(np.add.accumulate(steps)[-1])
    start = centre - step * 0.5
    if start + step * 0.5 != centre:
        # A tie of the rounding above.
        start = np.nextafter(start, np.inf if start + step * 0.5 < centre else -np.inf)
    return Axis(float(start), centre + step * (kept - 0.5), step, 0, kept)


def _axis(start: float, end: float, at: int, length: int) -> Axis:
    """Return the axis between two edges, with Pillow's rounding of them."""
    low, high = np.float32(start), np.float32(end)
    return Axis(float(low), float(high), float(high - low) / length, at, length)


def _shifted(axis: Axis, by: int) -> Axis:
    """Return the axis in a part that begins at pixel ``by``: the same sources, exactly."""
    return axis._replace(start=axis.start - by, end=axis.end - by)


def _sources(axis: Axis, size: int) -> tuple[int, int]:
    """Return the pixels that an axis of any filter may use, and some more."""
    reach = math.ceil(_WIDEST_SUPPORT * max(1.0, axis.step)) + 1
    return max(0, int(axis.start) - reach), min(size, math.ceil(axis.end) + reach)


def _goes_down_first(part: Part, width: int, height: int) -> bool:
    """Return whether Pillow resizes the columns of a part before its rows."""
    saved = part.height - height
    return saved > max(0, 2 * (part.width - width)) and _tall_images_go_down_first()


@lru_cache
def _tall_images_go_down_first() -> bool:
    """Return whether this Pillow resizes tall images by columns first; older ones never do."""
    stripes = Image.frombytes("L", (4, 64), bytes(37 * i % 251 for i in range(256)))
    way = Image.Resampling.BICUBIC
    return stripes.resize((3, 5), way) == stripes.resize((4, 5), way).resize((3, 5), way)


def resize_on_host(image: Image.Image, settings: Settings) -> Image.Image:
    """Return the upright RGB `image` in the size of the settings."""
    plan = plan_resize(image.width, image.height, settings)
    resized = _resize_part(image, plan, _FILTERS[settings.interpolation])
    size = settings.width, settings.height
    if resized.size == size:
        return resized
    red, green, blue = settings.pad_levels
    padded = Image.new("RGB", size, (red, green, blue))
    padded.paste(resized, (plan.x.at, plan.y.at))
    return padded


def _resize_part(image: Image.Image, plan: ResizePlan, way: Image.Resampling) -> Image.Image:
    left, top, width, height = part = plan.part
    x, y = plan.x, plan.y
    if way == Image.Resampling.NEAREST:
        corners = (x.step, 0, x.start, 0, y.step, y.start)
        return image.transform((x.length, y.length), Image.Transform.AFFINE, corners, way)
    if part != (0, 0, *image.size):
        image = image.crop((left, top, left + width, top + height))
    if _goes_down_first(part, x.length, y.length) == plan.down_first:
        return image.resize((x.length, y.length), way, (x.start, y.start, x.end, y.end))
    if plan.down_first:
        image = image.resize((width, y.length), way, (0, y.start, width, y.end))
        return image.resize((x.length, y.length), way, (x.start, 0, x.end, y.length))
    image = image.resize((x.length, height), way, (x.start, 0, x.end, height))
    return image.resize((x.length, y.length), way, (0, y.start, x.length, y.end))


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
