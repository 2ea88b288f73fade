"""The kernel's arithmetic in NumPy: the same sums, in the same order, rounded in the same places."""

from __future__ import annotations

import math

import numpy as np

from gpubridge.backends.image_preproc.resizing import ResizePlan

__all__ = ["resize_levels"]

_PRECISION = 22
_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}


def resize_levels(pixels: np.ndarray, plan: ResizePlan, interpolation: str) -> np.ndarray:
    """Resize the plan's part of ``[height, width, 3]`` levels; returns ``[plan.y.length, plan.x.length, 3]``."""
    left, top, width, height = plan.part
    pixels = pixels[top : top + height, left : left + width]
    across = _weights(interpolation, width, plan.x)
    down = _weights(interpolation, height, plan.y)
    if plan.down_first:
        return _weigh_rows(_weigh(pixels, down), across)
    return _weigh(_weigh_rows(pixels, across), down)


def _weights(interpolation, size, axis):
    """First source and integer weights of each output of an axis."""
    start, _, scale, _, target = axis
    if interpolation == "nearest":
        steps = np.full(target, scale)
        steps[0] = start + scale * 0.5
        # One addition after the other, each rounded.
        positions = np.add.accumulate(steps)
        return [(int(at), [1 << _PRECISION] if 0 <= at < size else []) for at in positions]
    stretch = max(scale, 1.0)
    support = _SUPPORT[interpolation] * stretch
    found = []
    for index in range(target):
        centre = start + (index + 0.5) * scale
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), size)
        values = [
            _filter(interpolation, (source - centre + 0.5) * (1.0 / stretch))
            for source in range(first, last)
        ]
        total = 0.0
        for value in values:
            total += value
        weights = [value / (total or 1.0) * (1 << _PRECISION) for value in values]
        found.append((first, [int(weight + math.copysign(0.5, weight)) for weight in weights]))
    return found


def _filter(interpolation, x):
    if interpolation == "lanczos":
        return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0
    x = abs(x)
    if interpolation == "bilinear":
        return 1.0 - x if x < 1.0 else 0.0
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2.0 else 0.0


def _sinc(x):
    if x == 0.0:
        return 1.0
    x = x * math.pi
    return math.sin(x) / x


def _weigh_rows(pixels, weights):
    return _weigh(pixels.transpose(1, 0, 2), weights).transpose(1, 0, 2)


def _weigh(pixels, weights):
    """Weigh along the first axis, in integers; rounded to 8 bits."""
    result = np.empty((len(weights), *pixels.shape[1:]), np.uint8)
    for index, (first, taps) in enumerate(weights):
        block = pixels[first : first + len(taps)].astype(np.int64)
        sums = np.tensordot(np.asarray(taps, np.int64), block, 1) if taps else 0
        result[index] = np.clip((sums + (1 << (_PRECISION - 1))) >> _PRECISION, 0, 255)
    return result
