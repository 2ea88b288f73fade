"""Rate of image_preproc's kernel beside a copy on the device: python -m benchmarks.gpu_image_kernel.

Bytes are those of the pixels that are read (the box that is resized) and of the results. A copy's are
counted once read and once written. Values are compared with Pillow's before a size is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.gpu_memory import first_device
from gpubridge.backends.image_preproc.kernels import (
    DeviceKernel,
    ImageWork,
    KernelUnavailable,
    SourcePixels,
)
from gpubridge.backends.image_preproc.resizing import Normalization, plan_resize, resize_on_host
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.backends.model_setup import ModelSetup
from gpubridge.cuda_ipc import CopyStream, DeviceContext
from gpubridge.cuda_ipc.driver import call
from gpubridge.errors import BridgeError
from gpubridge.tensor.device_bytes import DeviceBytes

__all__ = ["main"]

_SIZES = ((500, 375), (640, 480), (1280, 720), (1920, 1080), (4000, 3000))
_BATCHES = (1, 8, 32, 128)
_WORDS = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}
_AIM = 0.5
_ROUNDS = 50


class Row(NamedTuple):
    """One line of the table: microseconds of a launch, bytes of it, and the share of a copy's rate."""

    width: int
    height: int
    images: int
    microseconds: float
    nbytes: int
    share: float


class _Memory:
    """Device memory that lives as long as the process."""

    def __init__(self, context: DeviceContext, device_bytes: int) -> None:
        self._context = context
        self._stream = CopyStream(context)
        self.ordinal = context.device.ordinal
        self.stream = self._stream
        self.capacity = device_bytes

    def allocate_device(self, nbytes: int) -> DeviceBytes:
        with self._context.pushed():
            return DeviceBytes(int(call("cuMemAlloc", nbytes)), nbytes, self.ordinal)

    def upload(self, memory: memoryview) -> DeviceBytes:
        data = self.allocate_device(memory.nbytes)
        self._stream.h2d(data.pointer, memory, memory.nbytes)
        self._stream.wait()
        return data

    def copy_to_host(self, data: DeviceBytes, target: memoryview) -> None:
        self._stream.d2h(target, data.pointer, data.nbytes)
        self._stream.wait()

    def copy_on_device(self, data: DeviceBytes) -> DeviceBytes:
        return self.join([data])

    def join(self, parts: Sequence[DeviceBytes]) -> DeviceBytes:
        copy = self.allocate_device(sum(data.nbytes for data in parts))
        end = copy.pointer
        for data in parts:
            self._stream.d2d(end, data.pointer, data.nbytes)
            end += data.nbytes
        return copy

    def free(self, *all_of_them: DeviceBytes) -> None:
        for data in all_of_them:
            with self._context.pushed():
                call("cuMemFree", data.pointer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table in Markdown; 0 if every batch of 32 and more reaches half a copy's rate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_image_kernel")
    parser.add_argument("--dtype", choices=sorted(_WORDS), default="FP16")
    parser.add_argument("--interpolation", default="bilinear")
    parser.add_argument("--quick", action="store_true", help="one small row, to see that it works")
    options = parser.parse_args(arguments)
    try:
        device, release = first_device()
        context = DeviceContext(device)
        memory = _Memory(context, device.nbytes)
        settings = _settings(options.dtype, options.interpolation)
        kernel = DeviceKernel(settings, context, memory)
    except (BridgeError, KernelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{device.name}, CUDA {release}; {options.interpolation} to 224 x 224, {options.dtype}\n")
    print(
        "| source | images | µs | images/s | GB/s | of a copy's rate |\n|---|---|---|---|---|---|"
    )
    enough = True
    sizes, batches = (((60, 45),), (2,)) if options.quick else (_SIZES, _BATCHES)
    for width, height in sizes:
        for images in batches:
            row = _measure(kernel, memory, settings, (width, height, images))
            rate = row.nbytes / row.microseconds / 1e3
            print(
                f"| {width} x {height} | {images} | {row.microseconds:.1f} "
                f"| {images / row.microseconds * 1e6:,.0f} | {rate:.0f} | {row.share:.0%} |",
                flush=True,
            )
            enough = enough and (images < 32 or row.share >= _AIM)
    return 0 if enough else 1


def _settings(dtype: str, interpolation: str) -> Settings:
    words = {"SIZE": "224", "DTYPE": dtype, "INTERPOLATION": interpolation}
    entries = {key: {"string_value": value} for key, value in words.items()}
    config = {"name": "m", "backend": "image_preproc", "max_batch_size": 1, "parameters": entries}
    return Settings.from_setup(ModelSetup.from_config(config))


def _measure(
    kernel: DeviceKernel, memory: _Memory, settings: Settings, case: tuple[int, int, int]
) -> Row:
    width, height, images = case
    plan = plan_resize(width, height, settings)
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    # Each image has pixels of its own: what is in the cache of the device is not what is measured.
    sources = [memory.upload(pixels.reshape(-1).data) for _ in range(images)]
    result = (
        images * 3 * settings.width * settings.height * np.dtype(_WORDS[settings.dtype]).itemsize
    )
    target = memory.allocate_device(result)
    work = [
        ImageWork(
            SourcePixels(source.pointer, width, height, 3 * width),
            plan,
            target.pointer + index * (result // images),
        )
        for index, source in enumerate(sources)
    ]
    stream = memory.stream
    tables: list[DeviceBytes] = []
    tables.append(kernel.launch(work, stream.handle))
    _check(memory, settings, pixels, target)
    read = int(3 * (plan.x.end - plan.x.start) * (plan.y.end - plan.y.start)) * images
    other = memory.allocate_device(result + read)
    same = memory.allocate_device(result + read)
    taken = _timed(lambda: tables.append(kernel.launch(work, stream.handle)), stream)
    copied = _timed(lambda: stream.d2d(other.pointer, same.pointer, other.nbytes), stream)
    memory.free(target, other, same, *sources, *tables)
    nbytes = read + result
    return Row(width, height, images, taken, nbytes, (nbytes / taken) / (2 * nbytes / copied))


def _timed(launch: Callable[[], object], stream: CopyStream) -> float:
    """Return the microseconds of one of many launches in a row."""
    launch()
    stream.wait()
    # Of what takes long, as on a driver that only simulates, fewer will do.
    began = time.perf_counter()
    launch()
    stream.wait()
    rounds = _ROUNDS if time.perf_counter() - began < 0.1 else 1
    began = time.perf_counter()
    for _ in range(rounds):
        launch()
    stream.wait()
    return (time.perf_counter() - began) / rounds * 1e6


def _check(
    memory: _Memory, settings: Settings, pixels: npt.NDArray[np.uint8], target: DeviceBytes
) -> None:
    expected = np.empty(settings.image_shape, _WORDS[settings.dtype])
    Normalization(settings).write(resize_on_host(Image.fromarray(pixels), settings), expected)
    made = np.empty((target.nbytes // expected.nbytes, *expected.shape), expected.dtype)
    memory.copy_to_host(target, made.reshape(-1).view(np.uint8).data)
    for values in made:
        np.testing.assert_array_equal(values, expected)


if __name__ == "__main__":
    sys.exit(main())
