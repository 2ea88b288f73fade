"""Preprocessing on the CPU: the images of a batch on threads, one image each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from gpubridge.backends.image_preproc.batch import ImageRequest
from gpubridge.backends.image_preproc.host_decoding import Decoder
from gpubridge.backends.image_preproc.image_files import ImageError
from gpubridge.backends.image_preproc.normalization import Normalization
from gpubridge.backends.image_preproc.resizing import resize_on_host
from gpubridge.backends.image_preproc.settings import Settings

__all__ = ["HostPath"]


class HostPath:
    """Fills outputs in host memory.

    Parameters
    ----------
    threads : ThreadPoolExecutor
        Not closed here.
    """

    def __init__(self, settings: Settings, decoder: Decoder, threads: ThreadPoolExecutor) -> None:
        self._settings = settings
        self._decoder = decoder
        self._threads = threads
        self.normalization = Normalization(settings)

    @property
    def description(self) -> str:
        """What is used, for the log."""
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
        """Nothing is held here."""

    def _preprocess(self, encoded: bytes, pixels: npt.NDArray[Any]) -> None:
        image = resize_on_host(self._decoder.decode(encoded).upright(), self._settings)
        self.normalization.write(image, pixels)
