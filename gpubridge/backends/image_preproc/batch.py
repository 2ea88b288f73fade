"""The requests of one batch: their images, their outputs, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from gpubridge.backends.image_preproc.image_files import ImageError
from gpubridge.backends.image_preproc.settings import Settings


class ImageRequest:
    """One request: whatever is wrong with an image of it fails this one and no other.

    ``encoded`` are its files, ``shape`` that of all of its pixels, ``output`` where they go.
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
        """Return whether the response is an error by now."""
        return bool(self._complaints) or self._failure is not None

    def ask_for_output(self, device: str | None = None) -> bool:
        """Ask for the place of the output; without room there, the request fails: return False."""
        settings = self._settings
        shape = self.shape if settings.images else self.shape[1:]
        try:
            self.output = self._request.output(settings.output_name, shape, settings.dtype, device)
        except pb_utils.TritonModelException as error:
            self._failure = str(error)
        return self.output is not None

    def refuse(self, index: int, error: ImageError) -> None:
        """Note what is wrong with an image."""
        self._complaints[index] = f"{self._settings.input_name}[{index}]: {error}"

    def response(self) -> pb_utils.InferenceResponse:
        """Return the pixels, or an error that names each bad image."""
        code = pb_utils.TritonError.INVALID_ARG
        text = "\n".join(self._complaints[index] for index in sorted(self._complaints))
        if self._failure is not None:
            code, text = pb_utils.TritonError.UNAVAILABLE, self._failure
        if text:
            error = pb_utils.TritonError(text, code)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        return pb_utils.InferenceResponse(output_tensors=[self.output])
