"""nvImageCodec for the simulated driver: as much of it as image_preproc uses, decoded by Pillow.

Images lie in memory of the simulated device, with rows apart, and are complete on the stream that was
named, not before. A JPEG with `REFUSED` in a comment is one that no GPU decodes.
"""

import ctypes
import io

import numpy as np
from cuda.bindings import driver
from PIL import Image as PillowImage, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

NVIMGCODEC_DEVICE_CPU_ONLY = -99999
REFUSED = b"no GPU decodes this"
_GAP = 5


class ColorSpec:
    SRGB = 1


class BackendKind:
    CPU_ONLY, GPU_ONLY, HYBRID_CPU_GPU, HW_GPU_ONLY = range(1, 5)


class Backend:
    def __init__(self, kind, load_hint=1.0):
        assert 0 <= load_hint <= 1


class DecodeParams:
    def __init__(self, apply_exif_orientation=True, color_spec=ColorSpec.SRGB):
        assert apply_exif_orientation


class CodeStream:
    def __init__(self, encoded):
        self.encoded = bytes(encoded)
        # Not PillowImage.open(), which has a limit of its own.
        with JpegImageFile(io.BytesIO(self.encoded)) as image:
            self.width, self.height = image.size
            self.num_channels = len(image.getbands())


class Image:
    """Three bytes per pixel on a device."""

    def __init__(self, pixels, stream):
        height, width, _ = pixels.shape
        pitch = 3 * width + _GAP
        rows = np.zeros((height, pitch), np.uint8)
        rows[:, : 3 * width] = pixels.reshape(height, -1)
        self._pointer = int(_ok(driver.cuMemAlloc(rows.nbytes)))
        _ok(driver.cuMemcpyHtoDAsync(self._pointer, rows, rows.nbytes, stream))
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": pixels.shape,
            "typestr": "|u1",
            "data": (self._pointer, False),
            "strides": (pitch, 3, 1),
        }

    def __del__(self):
        _ok(driver.cuMemFree(self._pointer))


class Decoder:
    def __init__(self, device_id, max_num_cpu_threads, backends, options):
        assert max_num_cpu_threads > 0
        assert backends
        assert options == ":fancy_upsampling=1"
        self._on_device = device_id != NVIMGCODEC_DEVICE_CPU_ONLY

    def decode(self, source, params, cuda_stream=0):
        if self._on_device:
            assert isinstance(source, list)
            assert ctypes.c_void_p(cuda_stream).value not in (None, 1, 2)
            return [self._decode(code, cuda_stream) for code in source]
        return self._decode(source, None)

    def _decode(self, code, stream):
        if stream is not None and REFUSED in code.encoded:
            return None
        try:
            image = PillowImage.open(io.BytesIO(code.encoded))
            pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception:
            return None
        return pixels if stream is None else Image(pixels, stream)


def _ok(answer):
    assert int(answer[0]) == 0, answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]
