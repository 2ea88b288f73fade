"""Time of each step of the Pillow model, in one thread, without a server."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageOps

__all__ = ["time_steps"]

_ROUNDS = 7
_SHORTER, _SIDE = 256, 224


def time_steps(jpegs: Sequence[bytes]) -> dict[str, float]:
    """Return milliseconds of an image, the mean over the files, by step: the best of some rounds."""
    taken = dict.fromkeys(("decode", "resize", "normalise"), 0.0)
    for jpeg in jpegs:
        image, seconds = _best(partial(_decode, jpeg))
        taken["decode"] += seconds
        cropped, seconds = _best(partial(_resize, image))
        taken["resize"] += seconds
        _, seconds = _best(partial(_normalise, cropped))
        taken["normalise"] += seconds
    return {step: seconds / len(jpegs) * 1e3 for step, seconds in taken.items()}


def _decode(jpeg: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB")


def _resize(image: Image.Image) -> Image.Image:
    shorter = min(image.size)
    width, height = (_SHORTER * side // shorter for side in image.size)
    left, top = round((width - _SIDE) / 2), round((height - _SIDE) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + _SIDE, top + _SIDE))


def _normalise(image: Image.Image) -> Any:
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    deviation = np.array([0.229, 0.224, 0.225], np.float32)
    pixels = (np.asarray(image, np.float32) / 255 - mean) / deviation
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _best(step: Callable[[], Any]) -> tuple[Any, float]:
    result, seconds = step(), float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        step()
        seconds = min(seconds, time.perf_counter() - began)
    return result, seconds
