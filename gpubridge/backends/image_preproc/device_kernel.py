"""The compiled kernel on one GPU: loaded once, launched once per chunk of images."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from gpubridge.backends.image_preproc.fused_kernel import (
    KERNEL,
    SOURCE,
    THREADS,
    ImageWork,
    grid,
    image_table,
    launch_numbers,
)
from gpubridge.backends.image_preproc.kernel_build import cache_folder, kernel_image
from gpubridge.backends.image_preproc.normalization import Normalization
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.cuda_ipc import DeviceContext
from gpubridge.cuda_ipc.driver import call, load
from gpubridge.pb_utils.device_memory import DeviceMemory
from gpubridge.tensor.device_bytes import DeviceBytes

__all__ = ["DeviceKernel"]

_TYPES = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int,) * 5, ctypes.c_uint)


class DeviceKernel:
    """``resize_normalize.cu`` for one model.

    Raises
    ------
    KernelUnavailable
        It cannot be compiled here.
    BridgeError
        The GPU does not take it, or has no room.
    """

    def __init__(self, settings: Settings, context: DeviceContext, memory: DeviceMemory) -> None:
        self._settings = settings
        self._context = context
        self._memory = memory
        normalization = Normalization(settings)
        self._numbers = launch_numbers(settings, normalization.element_bytes)
        image = kernel_image(SOURCE, _capability(context), cache_folder())
        self._levels: DeviceBytes | None = memory.upload(normalization.levels().data)
        self._levels.complete()
        with context.pushed():
            self._module = call("cuModuleLoadData", image)
            self._function = call("cuModuleGetFunction", self._module, KERNEL.encode())

    def launch(self, work: Sequence[ImageWork], stream: int) -> DeviceBytes:
        """Launch the kernel for images on a stream.

        What was uploaded by now is there before the kernel begins.

        Returns
        -------
        DeviceBytes
            What it reads beside the pixels: to be held until it is done.
        """
        levels = self._levels
        assert levels is not None  # not closed
        images = self._memory.upload(image_table(work).view(np.uint8).data)
        if images.ready is not None:
            images.ready.order_before(stream)
        values = (images.pointer, levels.pointer, *self._numbers)
        blocks = (*grid(self._settings, len(work)), 1)
        with self._context.pushed():
            call(
                "cuLaunchKernel",
                self._function,
                *(*blocks, THREADS, 1, 1, 0),
                *(stream, (values, _TYPES), 0),
            )
        return images

    def close(self) -> None:
        """Unload it; nothing may run any more. Idempotent."""
        module, self._module = self._module, None
        self._levels = None
        if module is not None:
            with self._context.pushed():
                call("cuModuleUnload", module)


def _capability(context: DeviceContext) -> tuple[int, int]:
    device = call("cuDeviceGet", context.device.ordinal)
    names = load().CUdevice_attribute
    major, minor = (
        int(call("cuDeviceGetAttribute", getattr(names, f"{_ATTRIBUTE}_{part}"), device))
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


_ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
