"""What the GPU's kernel is told: the layout of ``resize_normalize.cu``'s arguments, and its grid.

Nothing of CUDA is needed here: the tests run the kernel's source on a processor by the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpubridge.backends.image_preproc.resizing import ResizePlan
from gpubridge.backends.image_preproc.settings import Settings

__all__ = [
    "IMAGE",
    "KERNEL",
    "MOST_IMAGES",
    "SOURCE",
    "THREADS",
    "ImageWork",
    "SourcePixels",
    "grid",
    "image_table",
    "launch_numbers",
]

KERNEL = "resize_normalize"
SOURCE = Path(__file__).with_name("resize_normalize.cu")
THREADS = 256
#: Images of one launch: a limit of the grid, and a bound for the table.
MOST_IMAGES = 4096
_TILE_WIDTH, _TILE_HEIGHT = 32, 16
_FILTERS = {"nearest": 0, "bilinear": 1, "bicubic": 2, "lanczos": 3}

IMAGE = np.dtype(
    [
        ("origin", np.uint64),
        ("first", np.uint64),
        ("end", np.uint64),
        ("target", np.uint64),
        ("dx", np.int64),
        ("dy", np.int64),
        ("width", np.int32),
        ("height", np.int32),
        ("left", np.float32),
        ("top", np.float32),
        ("extent_x", np.float32),
        ("extent_y", np.float32),
        ("target_left", np.int32),
        ("target_top", np.int32),
        ("target_width", np.int32),
        ("target_height", np.int32),
        ("transposed", np.int32),
    ],
    align=True,
)


class SourcePixels(NamedTuple):
    """8-bit RGB pixels in memory, as they were decoded: rows of `width` pixels, `pitch` bytes apart.

    Attributes
    ----------
    orientation : int
        How EXIF says that the image is turned, 1 to 8; 1 is upright.
    """

    pointer: int
    width: int
    height: int
    pitch: int
    orientation: int = 1

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as a viewer shows it."""
        if self.orientation >= 5:
            return self.height, self.width
        return self.width, self.height

    def walk(self) -> tuple[int, int, int]:
        """Return the address of the upright image's first pixel, and the steps right and down."""
        last_column, last_row = 3 * (self.width - 1), self.pitch * (self.height - 1)
        at, dx, dy = {
            1: (0, 3, self.pitch),
            2: (last_column, -3, self.pitch),
            3: (last_row + last_column, -3, -self.pitch),
            4: (last_row, 3, -self.pitch),
            5: (0, self.pitch, 3),
            6: (last_row, -self.pitch, 3),
            7: (last_row + last_column, -self.pitch, -3),
            8: (last_column, self.pitch, -3),
        }[self.orientation]
        return self.pointer + at, dx, dy


class ImageWork(NamedTuple):
    """One image of a launch: its pixels, what is done to it, and the address of its output."""

    pixels: SourcePixels
    plan: ResizePlan
    target: int


def image_table(work: Sequence[ImageWork]) -> npt.NDArray[np.void]:
    """Return what the kernel is told of images: an array of `IMAGE`."""
    table = np.array([_entry(*image) for image in work], IMAGE)
    # Pillow keeps boxes in single precision, and subtracts there.
    table["extent_x"] -= table["left"]
    table["extent_y"] -= table["top"]
    return table


def _entry(pixels: SourcePixels, plan: ResizePlan, target: int) -> tuple[float, ...]:
    """Return an element whose extents are still the sides of the box."""
    origin, dx, dy = pixels.walk()
    end = pixels.pointer + pixels.pitch * (pixels.height - 1) + 3 * pixels.width
    width, height = pixels.upright_size
    (left, top, right, bottom), at_x, at_y, target_width, target_height, down_first = plan
    memory = (origin, pixels.pointer, end, target)
    if down_first:
        # The kernel goes across first; to it, this image lies on its side.
        upright = (dy, dx, height, width, top, left, bottom, right)
        return (*memory, *upright, at_y, at_x, target_height, target_width, 1)
    upright = (dx, dy, width, height, left, top, right, bottom)
    return (*memory, *upright, at_x, at_y, target_width, target_height, 0)


def grid(settings: Settings, images: int) -> tuple[int, int]:
    """Return the blocks of a launch: tiles of an image, whichever way it lies, and images."""
    width, height = settings.width, settings.height
    return max(_tiles(width, height), _tiles(height, width)), images


def _tiles(width: int, height: int) -> int:
    return -(-width // _TILE_WIDTH) * -(-height // _TILE_HEIGHT)


def launch_numbers(settings: Settings, element_bytes: int) -> tuple[int, ...]:
    """Return the arguments after the two tables: five of ``int``, one of ``unsigned``."""
    red, green, blue = settings.pad_levels
    return (
        settings.width,
        settings.height,
        _FILTERS[settings.interpolation],
        int(settings.layout == "NHWC"),
        element_bytes,
        red | green << 8 | blue << 16,
    )
