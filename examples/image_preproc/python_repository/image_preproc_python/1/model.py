"""Image files to tensors on a GPU: nvImageCodec decodes, one CuPy kernel does the rest.

It does what the backend `image_preproc` does, in a model.py to change at will, and runs under Triton too.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import cupy
import numpy as np
import triton_python_backend_utils as pb_utils
from nvidia import nvimgcodec

# Makes one value of the result: a bilinear resize with antialiasing (Pillow's), then gain and bias. The
# image may have any strides, and so may the result.
RESIZE = cupy.ElementwiseKernel(
    in_params="raw uint8 image, raw float32 gain, raw float32 bias, int32 width, "
    "float32 left, float32 top, float32 scale_x, float32 scale_y",
    out_params="float32 value",
    preamble="""
    // The source pixels of one output pixel, along one axis.
    struct Taps {
        float center, spread;
        int first, last;

        __device__ Taps(float center, float scale, int length)
            : center(center),
              spread(fmaxf(scale, 1)),
              first(max(0, static_cast<int>(center - spread + .5f))),
              last(min(length, static_cast<int>(center + spread + .5f))) {}

        __device__ float weight(int pixel) const {
            return fmaxf(0, 1 - fabsf(pixel + .5f - center) / spread);
        }
    };
    """,
    operation="""
    const int channel = i % 3, x = i / 3 % width, y = i / 3 / width;
    const Taps across(left + (x + .5f) * scale_x, scale_x, image.shape()[1]);
    const Taps down(top + (y + .5f) * scale_y, scale_y, image.shape()[0]);
    float sum = 0, weights = 0;
    for (int row = down.first; row < down.last; ++row)
        for (int column = across.first; column < across.last; ++column) {
            const int place[] = {row, column, channel};
            const float weight = down.weight(row) * across.weight(column);
            sum += weight * image[place];
            weights += weight;
        }
    value = sum / weights * gain[channel] + bias[channel];
    """,
    name="resize_and_normalize",
)

# In gpubridge, arrays made in this block are handed to other models on the GPU as they are.
in_arena = getattr(pb_utils, "device_arena", contextlib.nullcontext)


class Images:
    """The images of one request: a bad one fails this request and no other."""

    def __init__(self, request: Any) -> None:
        tensor = pb_utils.get_input_tensor_by_name(request, "IMAGE")
        self.files = tensor.as_numpy().reshape(-1)
        self.decoded: list[Any] = [None] * len(self.files)
        self.complaints: list[str] = []

    def refuse(self, index: int, reason: str) -> None:
        self.complaints.append(f"IMAGE[{index}]: {reason}")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        settings = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        self.size = int(settings["SIZE"])
        self.shorter_side = int(settings["RESIZE_SHORTER_SIDE"])
        self.channels_last = settings["LAYOUT"] == "NHWC"
        self.max_pixels = int(settings["MAX_PIXELS"])
        mean, deviation = (
            np.array(settings[name].split(","), np.float32)
            for name in ("NORMALIZE_MEAN", "NORMALIZE_STD")
        )
        ordinal = int(args["model_instance_device_id"])
        self.device = cupy.cuda.Device(ordinal)
        with self.device:
            # All work of this instance is on it, in order: nothing is waited for on the host.
            self.stream = cupy.cuda.Stream(non_blocking=True)
            with self.stream:
                self.gain = cupy.asarray(1 / (255 * deviation))
                self.bias = cupy.asarray(-mean / deviation)
        self.decoder = nvimgcodec.Decoder(device_id=ordinal, options=":fancy_upsampling=1")
        self.decoding = nvimgcodec.DecodeParams(
            apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        batch = [Images(request) for request in requests]
        with self.device, self.stream:
            self.decode(batch)
            return [self.answer(images) for images in batch]

    def decode(self, batch: list[Images]) -> None:
        """Decode the images of all requests in one call, which is what a GPU is good at."""
        opened = {}
        for images in batch:
            for index, file in enumerate(images.files):
                try:
                    opened[images, index] = self.open(file)
                except ValueError as error:
                    images.refuse(index, str(error))
        if not opened:
            return
        decoded = self.decoder.decode(
            list(opened.values()), params=self.decoding, cuda_stream=self.stream.ptr
        )
        for (images, index), image in zip(opened, decoded):
            if image is None or image.shape[2] != 3:
                images.refuse(index, "expected a whole image file that nvImageCodec decodes to RGB")
            else:
                # The same memory, which CuPy gives back to nvImageCodec.
                capsule = image.to_dlpack(self.stream.ptr)
                images.decoded[index] = cupy.from_dlpack(capsule)

    def open(self, file: bytes) -> Any:
        """Read the header: some kilobytes may claim gigapixels."""
        try:
            code = nvimgcodec.CodeStream(file)
            pixels = code.width * code.height
        except Exception as error:
            reason = f"expected an image file, got {len(file)} bytes of something else"
            raise ValueError(reason) from error
        if pixels > self.max_pixels:
            raise ValueError(f"expected at most {self.max_pixels} pixels, got {pixels}")
        return code

    def answer(self, images: Images) -> Any:
        """Resize and normalise the images of one request, or say what is wrong with them."""
        if images.complaints:
            code = pb_utils.TritonError.INVALID_ARG
            error = pb_utils.TritonError("\n".join(images.complaints), code)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        side = self.size
        shape = (side, side, 3) if self.channels_last else (3, side, side)
        with in_arena():
            pixels = cupy.empty((len(images.decoded), *shape), cupy.float32)
        for image, target in zip(images.decoded, pixels):
            self.preprocess(image, target if self.channels_last else target.transpose(1, 2, 0))
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("PIXELS", pixels)])

    def preprocess(self, image: cupy.ndarray, target: cupy.ndarray) -> None:
        """Launch the kernel for one image, `[height, width, 3]`, without waiting for it.

        Steps and rounding are those of torchvision's Resize and CenterCrop, but only what is kept is computed.
        """
        height, width, _ = image.shape
        shorter = min(height, width)
        resized_height = self.shorter_side * height // shorter
        resized_width = self.shorter_side * width // shorter
        scale_y, scale_x = height / resized_height, width / resized_width
        top = round((resized_height - self.size) / 2) * scale_y
        left = round((resized_width - self.size) / 2) * scale_x
        place = (self.size, left, top, scale_x, scale_y)
        RESIZE(image, self.gain, self.bias, *place, target)
