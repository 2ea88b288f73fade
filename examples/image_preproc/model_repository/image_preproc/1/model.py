"""JPEG files in, normalised image tensors out: what a vision model wants to be fed.

Decoding, resizing and normalising are in the modules beside this one. All of it runs on the CPU;
the path that keeps the pixels on the GPU from the decoder on comes with a later version.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from jpeg_decoding import ImageError, make_decoder
from normalization import Normalization
from resizing import resize_and_crop
from settings import Settings


class TritonPythonModel:
    """Preprocess every image of every request, several at a time."""

    def initialize(self, args: dict[str, Any]) -> None:
        self.settings = Settings.from_model_config(args["model_config"])
        self.decoder = make_decoder(self.settings.decoder, self.settings.max_pixels)
        self.normalization = Normalization(self.settings.mean, self.settings.std)
        self.threads = ThreadPoolExecutor(self.settings.threads, "image_preproc")
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: decoding with {self.decoder.name} on the CPU, "
            f"{self.settings.threads} images at a time"
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        # Every image of the whole batch is handed to the threads before the first is waited for.
        started = [self.start(request) for request in requests]
        return [self.respond(pixels, images) for pixels, images in started]

    def finalize(self) -> None:
        self.threads.shutdown()

    def start(self, request: Any) -> tuple[npt.NDArray[np.float32], list[Future[None]]]:
        """Return the request's output, shape [images, 3, height, width], and who is filling it."""
        encoded = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        crop = (3, self.settings.crop_height, self.settings.crop_width)
        pixels = np.empty((len(encoded), *crop), np.float32)
        images = [
            self.threads.submit(self.preprocess, jpeg, pixels[index])
            for index, jpeg in enumerate(encoded)
        ]
        return pixels, images

    def preprocess(self, jpeg: bytes, planes: npt.NDArray[np.float32]) -> None:
        """Decode, resize, crop and normalise one image into `planes`, [3, height, width].

        Raises
        ------
        ImageError
            The bytes are no usable image.
        """
        image = resize_and_crop(
            self.decoder.decode(jpeg),
            self.settings.shorter_side,
            self.settings.crop_width,
            self.settings.crop_height,
        )
        self.normalization.write(image, planes)

    def respond(self, pixels: npt.NDArray[np.float32], images: list[Future[None]]) -> Any:
        """Return the response of one request; bad images make it an error that names each."""
        complaints = []
        for index, image in enumerate(images):
            failure = image.exception()
            if isinstance(failure, ImageError):
                complaints.append(f"IMAGE[{index}]: {failure}")
            elif failure is not None:
                raise failure  # a bug of this model, not a bad image
        if complaints:
            refusal = pb_utils.TritonError("\n".join(complaints), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=refusal)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("PIXELS", pixels)])
