"""Preprocessing on the CPU: the images of a batch on threads, one image each."""

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
from PIL import Image, ImageFile

from gpubridge.backends.image_preproc.batch import ImageRequest
from gpubridge.backends.image_preproc.image_files import (
    FORMATS,
    ImageError,
    damaged,
    require_few_scans,
    require_format,
    require_pixels,
    webp_size,
)
from gpubridge.backends.image_preproc.resizing import Normalization, resize_on_host
from gpubridge.backends.image_preproc.settings import Settings

_ORIENTATION = 0x0112
_TILE_WIDTH, _TILE_LENGTH = 0x0142, 0x0143

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodedImage(NamedTuple):
    """An RGB image of 8 bits as it was stored, and how EXIF says that it is turned (1 to 8)."""

    stored: Image.Image
    orientation: int = 1

    def upright(self) -> Image.Image:
        """Return the image as viewers show it."""
        turn = _TURNS.get(self.orientation)
        return self.stored if turn is None else self.stored.transpose(turn)


class PillowDecoder:
    """Decodes files of some of `FORMATS` with Pillow, from several threads at a time."""

    name = "pillow"

    def __init__(self, max_pixels: int, formats: Sequence[str] = FORMATS) -> None:
        self._max_pixels = max_pixels
        self._formats = tuple(formats)

    def measure(self, encoded: bytes) -> tuple[int, int]:
        """Return width and height as they are stored, from the header; raises as `decode`."""
        return self._open(encoded)[1].size

    def decode(self, encoded: bytes) -> DecodedImage:
        """Return the first image of a file as RGB, as Pillow's ``convert("RGB")`` makes it.

        Transparency is dropped: what lies below it shows. ImageError for what cannot be decoded.
        """
        image_format, image = self._open(encoded)
        try:
            image.load()
            orientation = _orientation(image)
            rgb = image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:
            raise damaged(encoded, image_format, error) from error
        return DecodedImage(rgb, orientation)

    def _open(self, encoded: bytes) -> tuple[str, ImageFile.ImageFile]:
        """Read the header, and refuse what it tells to be too large."""
        image_format = require_format(encoded, self._formats)
        if image_format == "WebP":
            size = webp_size(encoded)
            if 0 in size:
                raise damaged(encoded, image_format, "no frame is in its header")
            require_pixels(*size, self._max_pixels)
        elif image_format == "JPEG":
            require_few_scans(encoded)
        try:
            # The plugin's own class rather than Image.open(): only the header is read here, and
            # our limit, not Pillow's global one, decides.
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
        require_few_scans(encoded)
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
    """Return the decoder on the CPU that DECODER asks for: Pillow, the faster, for auto."""
    kind = NvImageCodecDecoder if choice == "nvimagecodec" else PillowDecoder
    return kind(max_pixels, formats)


def nvimagecodec_installed() -> bool:
    """Say whether nvImageCodec can be imported, without importing it."""
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no package at all under the name "nvidia"
        return False


def _plugin(image_format: str) -> Any:
    # Imported when it is needed: Pillow may have been built without some of them.
    name = {"JPEG": "Jpeg", "PNG": "Png", "WebP": "WebP", "TIFF": "Tiff"}[image_format]
    return getattr(importlib.import_module(f"PIL.{name}ImagePlugin"), f"{name}ImageFile")


def _tile_size(image: Any) -> tuple[int, int]:
    """Return the size of a TIFF's tiles: memory is taken for a whole one, however small the image."""
    tags = image.tag_v2
    if _TILE_WIDTH not in tags and _TILE_LENGTH not in tags:
        return 1, 1
    return int(tags.get(_TILE_WIDTH, 1)), int(tags.get(_TILE_LENGTH, 1))


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  (metadata that nobody can read turns no image)
        return 1
    return orientation if orientation in _TURNS else 1


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
            f"{self._settings.threads} images at a time"
        )

    def fill(self, requests: Sequence[ImageRequest]) -> None:
        """Write the pixels of all requests, or note what is wrong with their images."""
        images = []
        for request in requests:
            if not request.ask_for_output():
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
            # Until all threads are done with the outputs, they stay.
            failure = failure or (None if isinstance(error, ImageError) else error)
        if failure is not None:
            raise failure  # a bug of this backend, not a bad image

    def _outcomes(self, images: Sequence[tuple[Any, ...]]) -> Iterator[Exception | None]:
        """Preprocess images; what each has raised, in their order."""
        if len(images) == 1 or self._settings.threads == 1:
            # Another thread would take it no sooner, and the hand-over costs.
            yield from (self._attempt(*image[2:]) for image in images)
            return
        # Every image of the whole batch is handed to the threads before the first is waited for.
        started = [self._threads.submit(self._attempt, *image[2:]) for image in images]
        yield from (future.result() for future in started)

    def _attempt(self, encoded: bytes, pixels: npt.NDArray[Any]) -> Exception | None:
        try:
            self._preprocess(encoded, pixels)
        # Whatever it is, the other images go on.
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _preprocess(self, encoded: bytes, pixels: npt.NDArray[Any]) -> None:
        image = resize_on_host(self._decoder.decode(encoded).upright(), self._settings)
        self.normalization.write(image, pixels)
