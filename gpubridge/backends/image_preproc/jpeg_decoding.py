"""JPEG bytes to an upright RGB image in host memory, by nvImageCodec or by Pillow.

Both decoders read the size from the header first, so that an image over the limit is refused
before a byte is allocated for its pixels. With ``fancy_upsampling=1`` nvImageCodec's CPU decoder
gives the same pixels as Pillow, bit for bit.

The bytes are a stranger's: whatever either decoder raises over them becomes an `ImageError`.
"""

from __future__ import annotations

import importlib.util
import io
import threading
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

__all__ = [
    "Decoder",
    "ImageError",
    "NvImageCodecDecoder",
    "PillowDecoder",
    "make_decoder",
]

JPEG_START = b"\xff\xd8\xff"


class ImageError(Exception):
    """An image cannot be used; the message says what was expected, what came, what to do."""


class Decoder(Protocol):
    """Decodes from several threads at a time."""

    name: str

    def decode(self, encoded: bytes) -> Image.Image:
        """Return the image as RGB, 8 bits per channel, turned as its EXIF orientation says.

        Raises
        ------
        ImageError
            Not a JPEG, over the pixel limit, truncated or damaged.
        """


class PillowDecoder:
    """Decodes with Pillow's libjpeg-turbo."""

    name = "pillow"

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels

    def decode(self, encoded: bytes) -> Image.Image:
        """See `Decoder.decode`."""
        require_jpeg(encoded)
        try:
            # The plugin's own class rather than Image.open(): only the header is read here, and
            # our limit, not Pillow's global one, decides.
            image: Image.Image = JpegImageFile(io.BytesIO(encoded))
        except Exception as error:
            raise damaged(encoded, error) from error
        require_pixels(*image.size, self._max_pixels)
        try:
            image.load()
            # In place: the function otherwise copies an image that needs no turn.
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:
            raise damaged(encoded, error) from error


class NvImageCodecDecoder:
    """Decodes with nvImageCodec on the CPU.

    One nvImageCodec decoder per calling thread: the threads of this model already take one image
    each, so a pool inside every decoder would only add hand-overs.
    """

    name = "nvimagecodec"

    def __init__(self, max_pixels: int) -> None:
        from nvidia import nvimgcodec  # noqa: PLC0415  (optional, and slow to import)

        self._max_pixels = max_pixels
        self._nvimgcodec = nvimgcodec
        self._parameters = nvimgcodec.DecodeParams(
            apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        self._of_thread = threading.local()

    def decode(self, encoded: bytes) -> Image.Image:
        """See `Decoder.decode`."""
        require_jpeg(encoded)
        try:
            stream = self._nvimgcodec.CodeStream(encoded)
            width, height = stream.width, stream.height  # the first use parses the header
        except Exception as error:
            raise damaged(encoded, error) from error
        require_pixels(width, height, self._max_pixels)
        try:
            decoded = self._decoder().decode(stream, params=self._parameters)
        except Exception as error:
            raise damaged(encoded, error) from error
        if decoded is None:
            raise damaged(encoded, "nvImageCodec wrote the reason to the server's log")
        return Image.fromarray(np.asarray(decoded))

    def _decoder(self) -> Any:
        if not hasattr(self._of_thread, "decoder"):
            codec = self._nvimgcodec
            self._of_thread.decoder = codec.Decoder(
                device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
                options=":fancy_upsampling=1",
            )
        return self._of_thread.decoder


def make_decoder(choice: str, max_pixels: int) -> Decoder:
    """Return the decoder that the parameter DECODER asks for.

    Raises
    ------
    ImportError
        nvImageCodec was asked for by name and is not installed.
    """
    if choice == "auto":
        choice = "nvimagecodec" if nvimagecodec_installed() else "pillow"
    return (
        NvImageCodecDecoder(max_pixels) if choice == "nvimagecodec" else PillowDecoder(max_pixels)
    )


def nvimagecodec_installed() -> bool:
    """Say whether nvImageCodec can be imported, without importing it."""
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no package at all under the name "nvidia"
        return False


def require_jpeg(encoded: bytes) -> None:
    """Raise `ImageError` unless `encoded` starts as every JPEG file does."""
    if not encoded.startswith(JPEG_START):
        start = f"starting {encoded[:8].hex(' ').upper()}" if encoded else "in all"
        raise ImageError(
            f"expected a JPEG file (starting FF D8 FF), got {len(encoded)} bytes {start}; "
            "send the file's own bytes, neither decoded nor in base64"
        )


def require_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise `ImageError` if an image of this size is over the limit."""
    if width * height > max_pixels:
        raise ImageError(
            f"expected at most {max_pixels} pixels, got {width} x {height} = {width * height}; "
            "send a smaller image or raise the model's parameter MAX_PIXELS"
        )


def damaged(encoded: bytes, reason: object) -> ImageError:
    """Return the error for a JPEG that starts well and cannot be decoded."""
    return ImageError(
        f"expected a whole JPEG file, got {len(encoded)} bytes that are truncated or damaged "
        f"({reason}); send the file again"
    )
