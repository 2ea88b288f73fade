"""Detection's post-processing: from a map of probabilities to the lines of text, cut out of the image."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from geometry import Rectangle, find_boxes, reading_order
from PIL import Image, ImageOps

# The recogniser's input: what it was trained with.
HEIGHT, MIN_WIDTH = 48, 320


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.pixel, self.box, self.unclip = (
            float(parameters[name]["string_value"])
            for name in ("PIXEL_THRESHOLD", "BOX_THRESHOLD", "UNCLIP_RATIO")
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        file = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0, 0]
        probability = pb_utils.get_input_tensor_by_name(request, "PROBABILITY").as_numpy()[0, 0]
        with Image.open(io.BytesIO(file)) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        boxes = self.find(probability, image)
        strips = [cut_out(image, box) for box in boxes]
        widths = [max(MIN_WIDTH, strip.shape[2]) for strip in strips]
        batch = np.zeros(
            (max(1, len(strips)), 3, HEIGHT, max(widths, default=MIN_WIDTH)), np.float32
        )
        for row, strip in zip(batch, strips):
            row[:, :, : strip.shape[2]] = strip
        corners = np.array([box.corners() for box in boxes], np.float32).reshape(-1, 4, 2)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("BOX", corners),
                pb_utils.Tensor("STRIP", batch),
                pb_utils.Tensor("WIDTH", np.array(widths, np.int32)),
            ]
        )

    def find(self, probability: npt.NDArray[np.float32], image: Image.Image) -> list[Rectangle]:
        """Return the boxes of the image's lines, in its pixels."""
        height, width = probability.shape
        # The image lies in the middle of the network's input.
        scale = min(width / image.width, height / image.height)
        border = np.array([width - image.width * scale, height - image.height * scale]) / 2
        found = find_boxes(probability, self.pixel, self.box, self.unclip)
        # Text below five pixels cannot be read.
        large = [box for box in found if min(box.width, box.height) >= 5]
        # A pixel's centre is half a pixel from its corner.
        return reading_order(
            [
                Rectangle(
                    (box.center + 0.5 - border) / scale,
                    box.right,
                    box.width / scale,
                    box.height / scale,
                )
                for box in large
            ]
        )


def cut_out(image: Image.Image, box: Rectangle) -> npt.NDArray[np.float32]:
    """Return what is in a box as the recogniser wants it: ``[3, 48, width]``, BGR, from -1 to 1.

    A box that is half as high again as wide has text that runs downwards, as on the spine of a book: it
    is turned.
    """
    size = max(1, round(box.width)), max(1, round(box.height))
    (left, top), _, _, _ = box.corners()
    x, y = box.right
    placed = image.transform(
        size, Image.Transform.AFFINE, (x, -y, left, y, x, top), Image.Resampling.BICUBIC
    )
    if placed.height >= 1.5 * placed.width:
        placed = placed.transpose(Image.Transpose.ROTATE_90)
    width = max(1, round(HEIGHT * placed.width / placed.height))
    pixels = np.asarray(placed.resize((width, HEIGHT), Image.Resampling.BILINEAR), np.float32)
    return pixels[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - 1
