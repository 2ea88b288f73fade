"""JPEG files in, image tensors out: what a vision model wants to be fed.

Decoding, resizing and normalising are in the modules beside this one. All of it runs on the CPU;
the path that keeps the pixels on the GPU from the decoder on comes with a later version.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.backends.libraries import import_library
from gpubridge.backends.model_setup import ModelSetup

import_library("PIL.Image", "pillow", "image_preproc")

from gpubridge.backends.image_preproc.jpeg_decoding import ImageError, make_decoder  # noqa: E402
from gpubridge.backends.image_preproc.normalization import Normalization  # noqa: E402
from gpubridge.backends.image_preproc.resizing import fit  # noqa: E402


class TritonPythonModel:
    """Preprocess every image of every request, several at a time."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Add the tensors that the parameters describe."""
        setup = ModelSetup.from_config(config.as_dict())
        settings = Settings.from_setup(setup)
        batched = setup.max_batch_size > 0
        if not setup.inputs:
            config.add_input(settings.input(batched).to_config())
        if not setup.outputs:
            config.add_output(settings.output(batched).to_config())
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters and start the threads."""
        setup = ModelSetup.from_args(args)
        self.settings = Settings.from_setup(setup)
        for notice in setup.unused_optimizations():
            pb_utils.Logger.log_warn(notice)
        self.decoder = make_decoder(self.settings.decoder, self.settings.max_pixels)
        self.normalization = Normalization(self.settings)
        self.threads = ThreadPoolExecutor(self.settings.threads, "image_preproc")
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: decoding with {self.decoder.name} on the CPU, "
            f"{self.settings.threads} images at a time"
        )

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[Any]:
        """Answer each request with its images' tensors."""
        # Every image of the whole batch is handed to the threads before the first is waited for.
        started = [self.start(request) for request in requests]
        return [self.respond(pixels, images) for pixels, images in started]

    def finalize(self) -> None:
        """Wait for the threads."""
        self.threads.shutdown()

    def start(
        self, request: pb_utils.InferenceRequest
    ) -> tuple[pb_utils.Tensor, list[Future[None]]]:
        """Return the request's output, and who is filling it."""
        settings = self.settings
        encoded = request.inputs()[0].as_numpy().reshape(-1)
        shape = (len(encoded), *settings.image_shape)
        tensor = request.output(
            settings.output_name, shape if settings.images else shape[1:], self.normalization.dtype
        )
        pixels = tensor.as_numpy().reshape(shape)
        images = [
            self.threads.submit(self.preprocess, jpeg, pixels[index])
            for index, jpeg in enumerate(encoded)
        ]
        return tensor, images

    def preprocess(self, jpeg: bytes, pixels: npt.NDArray[Any]) -> None:
        """Decode, resize and normalise one image into `pixels`.

        Raises
        ------
        ImageError
            The bytes are no usable image.
        """
        image = fit(self.decoder.decode(jpeg), self.settings)
        self.normalization.write(image, pixels)

    def respond(
        self, pixels: pb_utils.Tensor, images: list[Future[None]]
    ) -> pb_utils.InferenceResponse:
        """Return the response of one request; bad images make it an error that names each."""
        complaints = []
        for index, image in enumerate(images):
            failure = image.exception()
            if isinstance(failure, ImageError):
                complaints.append(f"{self.settings.input_name}[{index}]: {failure}")
            elif failure is not None:
                raise failure  # a bug of this backend, not a bad image
        if complaints:
            refusal = pb_utils.TritonError("\n".join(complaints), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=refusal)
        return pb_utils.InferenceResponse(output_tensors=[pixels])
