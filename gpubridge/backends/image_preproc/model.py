"""Turns image files into the input tensors of vision models.

Images are decoded, resized and normalised on the CPU (`host_path`) or on a GPU (`device_path`), by the same
plan and with the same levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.backends.model_setup import ModelSetup, import_library

import_library("PIL.Image", "pillow", "image_preproc")

from gpubridge.backends.image_preproc.host_path import (  # noqa: E402
    HostPath,
    ImageRequest,
    make_decoder,
)


class TritonPythonModel:
    """Preprocess every image of every request of a batch together."""

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
        """Read the parameters, start the threads, and prepare the GPU if the instance has one."""
        setup = ModelSetup.from_args(args)
        self.settings = Settings.from_setup(setup)
        for notice in (*setup.unused_optimizations(), *self.settings.notices()):
            pb_utils.Logger.log_warn(notice)
        self.threads = ThreadPoolExecutor(self.settings.decoding.threads, "image_preproc")
        name = args["model_instance_name"]
        on_gpu = self.path_on_gpu(name) if setup.gpu is not None else None
        self.path = on_gpu or self.path_on_host()
        pb_utils.Logger.log_info(f"{name}: {self.path.description}")

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[Any]:
        """Answer each request with its images' tensors."""
        batch = [ImageRequest(request, self.settings) for request in requests]
        self.path.fill(batch)
        return [request.response() for request in batch]

    def finalize(self) -> None:
        """Wait for the threads, and free resources on the GPU."""
        self.threads.shutdown()
        self.path.close()

    def path_on_host(self) -> HostPath:
        """Return the path on the CPU, which works on any machine."""
        settings = self.settings
        if settings.dtype == "BF16":
            import_library("ml_dtypes", "ml_dtypes", "image_preproc")
        decoder = make_decoder(
            settings.decoding.decoder, settings.decoding.max_pixels, settings.decoding.formats
        )
        return HostPath(settings, decoder, self.threads)

    def path_on_gpu(self, name: str) -> Any:
        """Return the path on the instance's GPU, or log the reason and return None."""
        # Not imported for models on the CPU.
        from gpubridge.backends.image_preproc import device_path  # noqa: PLC0415

        path, reason = device_path.open_device_path(self.settings, self.threads)
        if path is None:
            pb_utils.Logger.log_warn(f"{name}: images are preprocessed on the CPU: {reason}")
        return path
