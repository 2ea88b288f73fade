"""Prints how near the GPU's kernel is to Pillow, as a table: python -m tests.host_kernel.accuracy.

The kernel's own source runs on this processor; both are given the same pixels. What a GPU makes of it is
tested by tests/gpu/test_image_preproc.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gpubridge.backends.image_preproc.host_path import (
    NvImageCodecDecoder,
    PillowDecoder,
    nvimagecodec_installed,
)
from gpubridge.backends.image_preproc.resizing import resize_on_host
from tests.host_kernel.running import run_kernel, source_of
from tests.image_settings import image_settings

_PHOTOS = Path(__file__).parents[2] / "examples" / "image_preproc" / "images"
_FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
_EXTREMES = {
    "1 x 1, 2 x 2, 1 x 999, 999 x 1": ((1, 1), (2, 2), (1, 999), (999, 1)),
    "odd sizes, smaller than the output": ((33, 2), (7, 91), (50, 40), (111, 223)),
    "odd sizes, larger": ((257, 1999), (1999, 257), (641, 427), (1283, 719)),
    "8000 x 6000": ((8000, 6000),),
}


def main() -> int:
    """Print the tables; 1 if a level is further off than it may be."""
    good = True
    print("| pixels | filter | values | equal | within 1 level | most |\n|---|---|---|---|---|---|")
    for name, images in _inputs().items():
        for interpolation in _FILTERS:
            size = "24, 32" if name.startswith("8000") else "224"
            settings = image_settings(
                SIZE=size, DTYPE="UINT8", LAYOUT="NHWC", INTERPOLATION=interpolation
            )
            off = np.concatenate([_difference(pixels, settings) for pixels in images()])
            equal, near, most = np.mean(off == 0), np.mean(off <= 1), off.max()
            good = good and near >= 0.999 and most <= 2
            print(
                f"| {name} | {interpolation} | {off.size:,} | {equal:.4%} | {near:.4%} | {most} |",
                flush=True,
            )
    _print_decoders()
    return 0 if good else 1


def _inputs():
    def photographs():
        for file in sorted(_PHOTOS.glob("*.jpg")):
            image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
            yield np.ascontiguousarray(image)

    def noise(sizes):
        def make():
            for width, height in sizes:
                rng = np.random.default_rng(width * height)
                yield rng.integers(0, 256, (height, width, 3), np.uint8)

        return make

    found = {"photographs": photographs}
    found.update({name: noise(sizes) for name, sizes in _EXTREMES.items()})
    return found


def _difference(pixels, settings):
    expected = np.asarray(resize_on_host(Image.fromarray(pixels), settings))
    made = run_kernel([source_of(pixels)], settings)[0]
    return np.abs(made.astype(int) - expected).ravel()


def _print_decoders():
    if not nvimagecodec_installed():
        print("\nnvImageCodec is not installed: its decoder on the CPU is not compared.")
        return
    pillow, other = PillowDecoder(10**8), NvImageCodecDecoder(10**8)
    print("\n| photograph | nvImageCodec on the CPU and Pillow: equal | most |\n|---|---|---|")
    for file in sorted(_PHOTOS.glob("*.jpg")):
        first, second = (
            np.asarray(decoder.decode(file.read_bytes()).upright()).astype(int)
            for decoder in (pillow, other)
        )
        off = np.abs(first - second)
        print(f"| {file.stem} | {np.mean(off == 0):.4%} | {off.max()} |")


if __name__ == "__main__":
    sys.exit(main())
