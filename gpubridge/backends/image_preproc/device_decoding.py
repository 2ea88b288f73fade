"""JPEG files to RGB pixels on a GPU, by nvImageCodec: a whole batch in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpubridge.backends.image_preproc.fused_kernel import SourcePixels
from gpubridge.backends.image_preproc.image_files import (
    jpeg_is_whole,
    require_few_scans,
    require_pixels,
)
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.cuda_ipc import DeviceContext
from gpubridge.cuda_ipc.driver import call, load
from gpubridge.errors import BridgeError

__all__ = ["DeviceDecoder", "DeviceStream", "PixelsOnDevice", "keep_freed_memory"]

_BYTES_OF_PIXEL = 3


class DeviceStream(NamedTuple):
    """A JPEG file whose header was read.

    Attributes
    ----------
    nbytes : int
        Of its pixels.
    """

    code: Any
    nbytes: int


class PixelsOnDevice(NamedTuple):
    """Decoded pixels and what keeps them."""

    source: SourcePixels
    owner: Any


class DeviceDecoder:
    """nvImageCodec on one GPU.

    Parameters
    ----------
    ordinal : int
        The device's number in this process.
    stream : int
        The CUDA stream on which the pixels are complete.

    Raises
    ------
    Exception
        Whatever nvImageCodec raises where it is not installed, or finds no decoder.
    """

    def __init__(self, settings: Settings, ordinal: int, stream: int) -> None:
        from nvidia import nvimgcodec  # noqa: PLC0415  (optional, and slow to import)

        self._codec = nvimgcodec
        self._stream = stream
        self._max_pixels = settings.max_pixels
        self._parameters = nvimgcodec.DecodeParams(
            apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        kinds = nvimgcodec.BackendKind
        shares = {
            "hardware": (kinds.HW_GPU_ONLY, settings.hw_load),
            "gpu": (kinds.GPU_ONLY, 1.0),
            "hybrid": (kinds.HYBRID_CPU_GPU, 1.0),
        }
        self._decoder: Any = nvimgcodec.Decoder(
            device_id=ordinal,
            max_num_cpu_threads=settings.threads,
            backends=[
                nvimgcodec.Backend(kind, load_hint=share)
                for kind, share in (shares[engine] for engine in settings.decode_engines)
            ],
            options=":fancy_upsampling=1",
        )

    def open(self, encoded: bytes) -> DeviceStream | None:
        """Read the header of a JPEG; None for what is rather the CPU's.

        Raises
        ------
        ImageError
            It is over the pixel limit, or has too many scans.
        """
        require_few_scans(encoded)
        try:
            code = self._codec.CodeStream(encoded)
            # The first use parses the header.
            width, height, components = code.width, code.height, code.num_channels
        except Exception:  # noqa: BLE001  (the CPU's decoders know more kinds, or say what is wrong)
            return None
        require_pixels(width, height, self._max_pixels)
        # Of truncated images and of four inks the CPU's decoder knows what to make.
        if components not in (1, 3) or not jpeg_is_whole(encoded):
            return None
        return DeviceStream(code, width * height * _BYTES_OF_PIXEL)

    def decode(self, streams: Sequence[DeviceStream]) -> list[PixelsOnDevice | None]:
        """Decode images as one batch, on the stream; None for each that could not be."""
        if not streams:
            return []
        try:
            images = self._decoder.decode(
                [stream.code for stream in streams],
                params=self._parameters,
                cuda_stream=self._stream,
            )
        except Exception:  # noqa: BLE001  (the CPU's decoder says what is wrong with which)
            return [None] * len(streams)
        return [_pixels(image) for image in images]

    def close(self) -> None:
        """Let go of the decoder and its memory; idempotent."""
        self._decoder = None


def keep_freed_memory(context: DeviceContext, nbytes: int) -> None:
    """Let the device's pool keep what is freed into it, for the next allocation of this process.

    Else it goes back to the driver whenever somebody waits, and each batch's images cost as many
    mappings of memory.
    """
    try:
        device = call("cuDeviceGet", context.device.ordinal)
        pool = call("cuDeviceGetDefaultMemPool", device)
        attribute = load().CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call("cuMemPoolSetAttribute", pool, attribute, load().cuuint64_t(nbytes))
    except BridgeError:
        pass  # a device without pools: nothing is allocated from them either


def _pixels(image: Any) -> PixelsOnDevice | None:
    """Look at an image of nvImageCodec; None for one that is not three bytes per pixel."""
    if image is None:
        return None
    described = image.__cuda_array_interface__
    shape, strides = described["shape"], described.get("strides")
    if len(shape) != 3 or shape[2] != _BYTES_OF_PIXEL or described["typestr"] not in ("|u1", "u1"):
        return None
    height, width, _ = (int(dim) for dim in shape)
    pitch = width * _BYTES_OF_PIXEL if strides is None else int(strides[0])
    if strides is not None and tuple(strides[1:]) != (_BYTES_OF_PIXEL, 1):
        return None
    source = SourcePixels(int(described["data"][0]), width, height, pitch)
    return PixelsOnDevice(source, image)
