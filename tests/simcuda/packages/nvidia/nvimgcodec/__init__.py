"""nvImageCodec for the simulated driver: as much of it as image_preproc uses, decoded by Pillow.

Images lie in memory of the simulated device, with rows apart, and are complete on the stream that was
named, not before: until then there is something else, even where the same image was before. A JPEG with `REFUSED` in a comment is one that no GPU decodes.
"""

import ctypes
import io

import numpy as np
from cuda.bindings import driver
from PIL import Image as PillowImage, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from gpubridge.tensor import dlpack, dlpack_abi

NVIMGCODEC_DEVICE_CPU_ONLY = -99999
REFUSED = b"no GPU decodes this"
_GAP = 5
# On the GPU it takes longer than whoever does not wait for the stream.
_DECODING_US = 10_000
_NOT_YET = 0xA5
_sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


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
        self.shape = pixels.shape
        self._pointer = int(_ok(driver.cuMemAlloc(rows.nbytes)))
        self._stream = stream
        _ok(driver.cuMemsetD8Async(self._pointer, _NOT_YET, rows.nbytes, stream))
        _ok(driver.cuLaunchHostFunc(stream, _sleep, _DECODING_US))
        _ok(driver.cuMemcpyHtoDAsync(self._pointer, rows, rows.nbytes, stream))
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": pixels.shape,
            "typestr": "|u1",
            "data": (self._pointer, False),
            "strides": (pitch, 3, 1),
        }

    def to_dlpack(self, cuda_stream=None):
        # Made for the stream that it is decoded on.
        assert cuda_stream == self._stream
        device = 2, int(_ok(driver.cuCtxGetDevice()))
        capsule = dlpack.make_capsule(
            self, self._pointer, "UINT8", self.shape, device, None, read_only=False, copied=False
        )
        managed = dlpack_abi.DLManagedTensor.from_address(_pointer_of(capsule, b"dltensor"))
        managed.dl_tensor.strides[0] = self.__cuda_array_interface__["strides"][0]
        return capsule

    def __del__(self):
        # Freed in the order of its stream.
        _ok(driver.cuStreamSynchronize(self._stream))
        _ok(driver.cuMemFree(self._pointer))


class Decoder:
    def __init__(self, device_id, max_num_cpu_threads=1, backends=None, options=""):
        assert max_num_cpu_threads > 0
        assert backends is None or backends
        assert options == ":fancy_upsampling=1"
        self._on_device = device_id != NVIMGCODEC_DEVICE_CPU_ONLY

    def decode(self, source, params, cuda_stream=0):
        if not self._on_device:
            return _decoded(source)
        assert isinstance(source, list)
        assert ctypes.c_void_p(cuda_stream).value not in (None, 1, 2)
        pixels = [None if REFUSED in code.encoded else _decoded(code) for code in source]
        return [None if found is None else Image(found, cuda_stream) for found in pixels]


def _decoded(code):
    try:
        image = PillowImage.open(io.BytesIO(code.encoded))
        # XMP's orientation is not applied.
        image.info.pop("xmp", None)
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception:
        return None


def _ok(answer):
    assert int(answer[0]) == 0, answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]
