"""Preprocessing on the CPU: threads process the images of a batch, one image each."""

from __future__ import annotations

import importlib
import importlib.util
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from PIL import Image, ImageFile

from gpubridge.backends.image_preproc.image_files import (
    FORMATS,
    ImageError,
    damaged,
    require_format,
    require_pixels,
    require_plain_jpeg,
    webp_size,
)
from gpubridge.backends.image_preproc.resizing import Normalization, resize_on_host
from gpubridge.backends.image_preproc.settings import Settings

_BITS, _INK, _ORIENTATION, _SIGN = 0x0102, 0x0106, 0x0112, 0x0153
_TILE_WIDTH, _TILE_LENGTH = 0x0142, 0x0143
_MOST_COMPLAINTS = 100
_EXIF = ("exif", "Raw profile type exif")

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageRequest:
    """One request; a bad image in it fails this request alone.

    ``encoded``: its image files; ``shape``: the shape of all its pixels; ``output``: their tensor.
    """

    def __init__(self, request: pb_utils.InferenceRequest, settings: Settings) -> None:
        self.encoded: npt.NDArray[Any] = request.inputs()[0].as_numpy().reshape(-1)
        self.shape = (len(self.encoded), *settings.image_shape)
        self.output: Any = None
        self._request = request
        self._settings = settings
        self._complaints: dict[int, str] = {}
        self._failure: str | None = None

    @property
    def failed(self) -> bool:
        """Return whether the response will be an error."""
        return bool(self._complaints) or self._failure is not None

    def allocate_output(self, device: str | None = None) -> bool:
        """Allocate the output; without memory for it, the request fails, and this returns False."""
        settings = self._settings
        shape = self.shape if settings.images else self.shape[1:]
        try:
            self.output = self._request.output(settings.output_name, shape, settings.dtype, device)
        except pb_utils.TritonModelException as error:
            self._failure = str(error)
        return self.output is not None

    def refuse(self, index: int, error: ImageError) -> None:
        """Record the error of an image."""
        self._complaints[index] = f"{self._settings.input_name}[{index}]: {error}"

    def response(self) -> pb_utils.InferenceResponse:
        """Return the pixels, or an error that names each bad image."""
        code = pb_utils.TritonError.INVALID_ARG
        lines = [self._complaints[index] for index in sorted(self._complaints)]
        if len(lines) > _MOST_COMPLAINTS:
            lines[_MOST_COMPLAINTS:] = [f"and {len(lines) - _MOST_COMPLAINTS} more bad images"]
        text = "\n".join(lines)
        if not lines and self._failure is not None:
            code, text = pb_utils.TritonError.UNAVAILABLE, self._failure
        if text:
            error = pb_utils.TritonError(text, code)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        return pb_utils.InferenceResponse(output_tensors=[self.output])


class DecodedImage(NamedTuple):
    """An RGB image of 8 bits as stored, and its EXIF orientation (1 to 8)."""

    stored: Image.Image
    orientation: int = 1

    def upright(self) -> Image.Image:
        """Return the image with the orientation applied."""
        turn = _TURNS.get(self.orientation)
        return self.stored if turn is None else self.stored.transpose(turn)


class PillowDecoder:
    """Decodes files of some of `FORMATS` with Pillow, from several threads at a time."""

    name = "pillow"

    def __init__(self, max_pixels: int, formats: Sequence[str] = FORMATS) -> None:
        self._max_pixels = max_pixels
        self._formats = tuple(formats)

    def measure(self, encoded: bytes) -> tuple[int, int]:
        """Return width and height as stored, from the header; raises as `decode`."""
        return self._open(encoded)[1].size

    def decode(self, encoded: bytes) -> DecodedImage:
        """Return the first image of a file as RGB, as Pillow's ``convert("RGB")`` makes it.

        The alpha channel is dropped; of gray levels of more than 8 bits the upper 8 are taken. Raises
        ImageError if the file cannot be decoded.
        """
        image_format, image = self._open(encoded)
        try:
            # Pillow turns a TIFF by itself, where it has no EXIF by XMP.
            image.info.pop("xmp", None)
            image.load()
            orientation = _orientation(image)
            gray = _upper_bits(image) if image.mode[0] == "I" else image
            rgb = image if image.mode == "RGB" else gray.convert("RGB")
        except Exception as error:
            raise damaged(encoded, image_format, error) from error
        return DecodedImage(rgb, orientation)

    def _open(self, encoded: bytes) -> tuple[str, ImageFile.ImageFile]:
        """Read the header, and refuse an image that is too large."""
        image_format = require_format(encoded, self._formats)
        if image_format == "WebP":
            size = webp_size(encoded)
            if 0 in size:
                raise damaged(encoded, image_format, "no frame is in its header")
            require_pixels(*size, self._max_pixels)
        elif image_format == "JPEG":
            require_plain_jpeg(encoded, self._max_pixels)
        try:
            # The plugin's class rather than Image.open(): this reads only the header, and our limit
            # applies instead of Pillow's global one.
            image: ImageFile.ImageFile = _plugin(image_format)(io.BytesIO(encoded))
            tile = _tile_size(image) if image_format == "TIFF" else (1, 1)
        except Exception as error:
            raise damaged(encoded, image_format, error) from error
        require_pixels(*image.size, self._max_pixels)
        require_pixels(*tile, self._max_pixels)
        return image_format, image


class NvImageCodecDecoder(PillowDecoder):
    """Decodes JPEG files with nvImageCodec on the CPU, others with Pillow.

    One nvImageCodec decoder per calling thread: the threads of this model already take one image
    each, so a pool inside every decoder would only add hand-overs.
    """

    name = "nvimagecodec"

    def __init__(self, max_pixels: int, formats: Sequence[str] = FORMATS) -> None:
        from nvidia import nvimgcodec  # noqa: PLC0415  (optional, and slow to import)

        super().__init__(max_pixels, formats)
        self._nvimgcodec = nvimgcodec
        self._parameters = nvimgcodec.DecodeParams(
            apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        self._of_thread = threading.local()

    def decode(self, encoded: bytes) -> DecodedImage:  # noqa: D102
        if require_format(encoded, self._formats) != "JPEG":
            return super().decode(encoded)
        require_plain_jpeg(encoded, self._max_pixels)
        try:
            stream = self._nvimgcodec.CodeStream(encoded)
            # The first use parses the header.
            width, height, components = stream.width, stream.height, stream.num_channels
        except Exception:  # noqa: BLE001  (Pillow knows more kinds of JPEG, or says what is wrong)
            return super().decode(encoded)
        if components not in (1, 3):
            return super().decode(encoded)
        require_pixels(width, height, self._max_pixels)
        try:
            decoded = self._decoder().decode(stream, params=self._parameters)
        except Exception as error:
            raise damaged(encoded, "JPEG", error) from error
        if decoded is None:
            reason = "nvImageCodec wrote the reason to the server's log"
            raise damaged(encoded, "JPEG", reason)
        return DecodedImage(Image.fromarray(np.asarray(decoded)))

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


def make_decoder(choice: str, max_pixels: int, formats: Sequence[str] = FORMATS) -> PillowDecoder:
    """Return the CPU decoder for DECODER: Pillow, the faster one, for auto."""
    kind = NvImageCodecDecoder if choice == "nvimagecodec" else PillowDecoder
    return kind(max_pixels, formats)


def nvimagecodec_installed() -> bool:
    """Return whether nvImageCodec can be imported, without importing it."""
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no package at all under the name "nvidia"
        return False


def _plugin(image_format: str) -> Any:
    # Imported on first use: Pillow may have been built without some of them.
    name = {"JPEG": "Jpeg", "PNG": "Png", "WebP": "WebP", "TIFF": "Tiff"}[image_format]
    return getattr(importlib.import_module(f"PIL.{name}ImagePlugin"), f"{name}ImageFile")


def _tile_size(image: Any) -> tuple[int, int]:
    """Return the size of a TIFF's tiles: Pillow allocates a whole one, however small the image."""
    tags = image.tag_v2
    if _TILE_WIDTH not in tags and _TILE_LENGTH not in tags:
        return 1, 1
    return int(tags.get(_TILE_WIDTH, 1)), int(tags.get(_TILE_LENGTH, 1))


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation; `Image.getexif` of the image may have XMP's, which GPUs disregard."""
    bare = Image.Image()
    bare.info = {key: image.info[key] for key in _EXIF if key in image.info}
    try:
        orientation = bare.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  (unreadable metadata has no orientation)
        return 1
    return orientation if orientation in _TURNS else 1


def _upper_bits(image: Image.Image) -> Image.Image:
    """Return a gray image of more than 8 bits with the upper 8 of each level, as other decoders do.

    Pillow cuts levels above 255. What may be negative (signed numbers) is left to it.
    """
    tags = getattr(image, "tag_v2", {})
    if tags.get(_SIGN, (1,))[0] != 1:
        return image
    levels = np.asarray(image).astype(np.uint32) >> (tags.get(_BITS, (16,))[0] - 8)
    if tags.get(_INK) == 0:
        # White is zero, which Pillow regards with 8 bits only.
        levels = 255 - levels
    return Image.fromarray(levels.astype(np.uint8))


class HostPath:
    """Fills outputs in host memory; ``threads`` are not closed here."""

    def __init__(
        self, settings: Settings, decoder: PillowDecoder, threads: ThreadPoolExecutor
    ) -> None:
        self._settings = settings
        self._decoder = decoder
        self._threads = threads
        self.normalization = Normalization(settings)

    @property
    def description(self) -> str:
        """Description of the decoder and its parallelism, for the log."""
        return (
            f"decoding with {self._decoder.name} on the CPU, "
            f"{self._settings.decoding.threads} images at a time"
        )

    def fill(self, requests: Sequence[ImageRequest]) -> None:
        """Write the pixels of all requests, or note what is wrong with their images."""
        images = []
        for request in requests:
            if not request.allocate_output():
                # Pixels of what is no image need no memory: that is what the client has to know.
                self._refuse_strangers(request)
                continue
            pixels = request.output.as_numpy().reshape(request.shape)
            images += [
                (request, index, encoded, pixels[index])
                for index, encoded in enumerate(request.encoded)
            ]
        failure = None
        for (request, index, _, _), error in zip(images, self._outcomes(images)):
            if isinstance(error, ImageError):
                request.refuse(index, error)
            # Raised below, when all threads are done with the outputs.
            failure = failure or (None if isinstance(error, ImageError) else error)
        if failure is not None:
            raise failure  # a bug of this backend, not a bad image

    def _refuse_strangers(self, request: ImageRequest) -> None:
        """Refuse what is no image by its first bytes."""
        for index, encoded in enumerate(request.encoded):
            try:
                require_format(encoded, self._settings.decoding.formats)
            except ImageError as error:
                request.refuse(index, error)

    def _outcomes(self, images: Sequence[tuple[Any, ...]]) -> Iterator[Exception | None]:
        """Preprocess images; yield the exception of each, or None, in order."""
        if len(images) == 1 or self._settings.decoding.threads == 1:
            # Another thread would be no faster.
            yield from (self._attempt(*image[2:]) for image in images)
            return
        # All images are submitted before the first is waited for.
        started = [self._threads.submit(self._attempt, *image[2:]) for image in images]
        yield from (future.result() for future in started)

    def _attempt(self, encoded: bytes, pixels: npt.NDArray[Any]) -> Exception | None:
        try:
            self._preprocess(encoded, pixels)
        # Any exception: the other images continue.
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _preprocess(self, encoded: bytes, pixels: npt.NDArray[Any]) -> None:
        image = resize_on_host(self._decoder.decode(encoded).upright(), self._settings)
        self.normalization.write(image, pixels)
