"""The limit of images on a GPU: nvImageCodec and the backend's kernel in this process, without a server."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpubridge.backends.image_preproc.device_path import DeviceDecoder, PixelsOnDevice
from gpubridge.backends.image_preproc.kernels import (
    IMAGE,
    KERNEL,
    SOURCE,
    THREADS,
    ImageWork,
    KernelUnavailable,
    cache_folder,
    compute_capability,
    grid,
    image_table,
    kernel_image,
    launch_numbers,
)
from gpubridge.backends.image_preproc.resizing import Normalization, plan_resize
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.backends.model_setup import ModelSetup
from gpubridge.cuda_ipc import CopyStream, DeviceContext, DeviceInfo, DeviceSegment
from gpubridge.cuda_ipc.driver import call
from gpubridge.errors import BridgeError

__all__ = ["BareImages", "bare_rate"]

_TYPES = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int,) * 5, ctypes.c_uint)
_OUTPUT = 3 * 224 * 224 * 4


class BareImages:
    """Decodes, resizes and normalises batches on a device; a context manager of one thread.

    Parameters
    ----------
    most : int
        Images of a batch.

    Raises
    ------
    BridgeError
        There is no nvImageCodec or no NVRTC.
    """

    def __init__(self, device: DeviceInfo, most: int) -> None:
        self._settings = settings = _settings(most)
        normalization = Normalization(settings)
        self._numbers = launch_numbers(settings, normalization.element_bytes)
        levels = normalization.levels()
        self._table = np.zeros(most, IMAGE)
        with ExitStack() as stack:
            self.context = DeviceContext(device)
            stack.callback(self.context.close)
            # Libraries mean the thread's device.
            self.context.make_current()
            self.stream = CopyStream(self.context)
            stack.callback(self.stream.close)
            sizes = (self._table.nbytes, levels.nbytes, most * _OUTPUT)
            segments = []
            for nbytes in sizes:
                segments.append(DeviceSegment.private(self.context, 0, nbytes))
                stack.callback(segments[-1].close)
            self._described, self._levels, self._output = segments
            self.stream.h2d(self._levels.pointer, _bytes_of(levels), levels.nbytes)
            try:
                self._decoder = DeviceDecoder(settings, device.ordinal, self.stream.handle)
                stack.callback(self._decoder.close)
                image = kernel_image(SOURCE, compute_capability(self.context), cache_folder())
            except (ImportError, KernelUnavailable) as error:
                raise BridgeError(
                    f"the limit needs nvImageCodec and NVRTC, as the backend does: {error}"
                ) from error
            with self.context.pushed():
                self._module = call("cuModuleLoadData", image)
                self._function = call("cuModuleGetFunction", self._module, KERNEL.encode())
            stack.callback(self._unload)
            self.stream.wait()
            self._owned = stack.pop_all()

    def __enter__(self) -> BareImages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owned.close()

    def run(self, jpegs: Sequence[bytes]) -> None:
        """Compute the pixels of a batch, and wait for them."""
        held = self.decode(jpegs)
        self.describe(held)
        self.launch(len(held))
        self.stream.wait()

    def decode(self, jpegs: Sequence[bytes]) -> list[PixelsOnDevice]:
        """Decode a batch on the stream.

        Raises
        ------
        BridgeError
            The device does not decode one of them.
        """
        streams = [self._decoder.open(jpeg) for jpeg in jpegs]
        decoded = self._decoder.decode([stream for stream in streams if stream is not None])
        good = [pixels for pixels in decoded if pixels is not None]
        if len(good) < len(jpegs):
            raise BridgeError(f"expected {len(jpegs)} images, the device decoded {len(good)}")
        return good

    def describe(self, images: Sequence[PixelsOnDevice]) -> None:
        """Upload the description of decoded images for the kernel."""
        work = []
        for index, pixels in enumerate(images):
            plan = plan_resize(*pixels.source.upright_size, self._settings)
            work.append(ImageWork(pixels.source, plan, self._output.pointer + index * _OUTPUT))
        self._table[: len(work)] = image_table(work)
        nbytes = len(images) * IMAGE.itemsize
        self.stream.h2d(self._described.pointer, _bytes_of(self._table), nbytes)

    def launch(self, images: int) -> None:
        """Launch the kernel for the described images."""
        values = (self._described.pointer, self._levels.pointer, *self._numbers)
        blocks = (*grid(self._settings, images), 1)
        with self.context.pushed():
            call(
                "cuLaunchKernel",
                self._function,
                *(*blocks, THREADS, 1, 1, 0),
                *(self.stream.handle, (values, _TYPES), 0),
            )

    def pixels(self, images: int) -> NDArray[np.float32]:
        """Return the output of the last launch."""
        data = bytearray(images * _OUTPUT)
        self.stream.d2h(memoryview(data), self._output.pointer, len(data))
        self.stream.wait()
        return np.frombuffer(data, np.float32).reshape(images, 3, 224, 224)

    def _unload(self) -> None:
        with self.context.pushed():
            call("cuModuleUnload", self._module)


def bare_rate(device: DeviceInfo, batches: Sequence[Sequence[bytes]], seconds: float) -> float:
    """Return images/s of batches, one after the other: the better of one thread and of two."""
    return max(_rate(device, batches, seconds, threads) for threads in (1, 2))


def _rate(
    device: DeviceInfo, batches: Sequence[Sequence[bytes]], seconds: float, threads: int
) -> float:
    counts = [0] * threads
    failures: list[str] = []
    ready = threading.Barrier(threads)
    spans = [0.0] * threads

    def work(number: int) -> None:
        try:
            with BareImages(device, len(batches[0])) as bare:
                bare.run(batches[0])
                ready.wait(60)
                began = time.perf_counter()
                turn = number
                while time.perf_counter() - began < seconds:
                    bare.run(batches[turn % len(batches)])
                    counts[number] += len(batches[0])
                    turn += 1
                spans[number] = time.perf_counter() - began
        # Whatever it is, the other thread waits for this one.
        except Exception as error:  # noqa: BLE001
            failures.append(str(error))
            ready.abort()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise BridgeError(failures[0])
    return sum(count / span for count, span in zip(counts, spans, strict=True))


def _settings(most: int) -> Settings:
    parameters = {"SIZE": "224", "RESIZE_MODE": "crop", "RESIZE_SHORTER_SIDE": "256"}
    return Settings.from_setup(
        ModelSetup.from_config(
            {
                "name": "images",
                "max_batch_size": most,
                "input": [{"name": "IMAGE", "data_type": "TYPE_STRING", "dims": [1]}],
                "output": [{"name": "PIXELS", "data_type": "TYPE_FP32", "dims": [3, 224, 224]}],
                "parameters": {key: {"string_value": text} for key, text in parameters.items()},
            }
        )
    )


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
