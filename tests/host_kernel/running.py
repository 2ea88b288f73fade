"""Runs ``resize_normalize.cu`` on a processor, as the backend launches it on a GPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from gpubridge.backends.image_preproc.kernels import (
    SOURCE,
    THREADS,
    ImageWork,
    SourcePixels,
    grid,
    image_table,
    launch_numbers,
)
from gpubridge.backends.image_preproc.resizing import Normalization, plan_resize
from gpubridge.backends.image_preproc.settings import Settings
from tests.simcuda.build import build_library

__all__ = ["build_kernel", "run_kernel", "source_of"]

_FOLDER = Path(__file__).resolve().parent / "csrc"
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@functools.cache
def build_kernel(quads: int = 24) -> Path:
    """Return the library with the kernel, of a step's width; compiled if it is not there yet."""
    return build_library(
        "libimagekernel.so",
        [_FOLDER / "launch.cpp"],
        [*sorted(_FOLDER.iterdir()), SOURCE, *SOURCE.parent.glob("*.cuh")],
        # As NVRTC compiles it: sums in double precision are rounded one by one. Jumps between fibers are none
        # that a fortified library knows.
        [
            *("-O2", "-ffp-contract=off", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"),
            f'-DKERNEL_SOURCE="{SOURCE}"',
            f"-DSHARED_QUADS={quads}",
        ],
    )


def source_of(pixels: np.ndarray, orientation: int = 1) -> SourcePixels:
    """Describe an array ``[height, width, 3]`` of uint8; rows may be apart."""
    height, width, _ = pixels.shape
    assert pixels.strides[1:] == (3, 1)
    return SourcePixels(pixels.ctypes.data, width, height, pixels.strides[0], orientation)


def run_kernel(sources: list[SourcePixels], settings: Settings, quads: int = 24) -> np.ndarray:
    """Return what the kernel makes of pixels in host memory, as bits ``[images, ...]``."""
    normalization = Normalization(settings)
    shape = (len(sources), *settings.image_shape)
    outputs = np.full(shape, 0x55, _BITS[normalization.element_bytes])
    work = [
        ImageWork(source, plan_resize(*source.upright_size, settings), output.ctypes.data)
        for source, output in zip(sources, outputs, strict=True)
    ]
    table = image_table(work)
    levels = normalization.levels()
    blocks = (ctypes.c_uint * 2)(*grid(settings, len(sources)))
    values = [ctypes.c_void_p(table.ctypes.data), ctypes.c_void_p(levels.ctypes.data)]
    values += [ctypes.c_uint(number) for number in launch_numbers(settings, outputs.itemsize)]
    parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    library = ctypes.CDLL(str(build_kernel(quads)))
    library.argument_bytes.restype = ctypes.c_size_t
    packed = ctypes.create_string_buffer(library.argument_bytes())
    library.pack_arguments(parameters, packed)
    assert library.launch_on_host(blocks, ctypes.c_uint(THREADS), packed, None) == 0
    return outputs
