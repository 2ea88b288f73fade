"""The ensemble's work by calls from Python, where the number of calls depends on the image.

Strips of like width share a call, so that none is padded to the width of a much longer one, and all calls of the
recogniser are under way at once. An image without text ends after its detection.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.strips_per_call = int(parameters["STRIPS_PER_CALL"]["string_value"])

    async def execute(self, requests: list[Any]) -> list[Any]:
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request: Any) -> Any:
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE")
        try:
            (pixels,) = await call("ocr_image", ["PIXELS"], image)
            (found,) = await call("text_detector", ["fetch_name_0"], renamed("x", pixels))
            box, strip, width = await call(
                "text_lines", ["BOX", "STRIP", "WIDTH"], image, renamed("PROBABILITY", found)
            )
            text, score = await self.read(strip.as_numpy(), width.as_numpy())
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TEXT", text), pb_utils.Tensor("SCORE", score), box]
        )

    async def read(
        self, strips: npt.NDArray[np.float32], widths: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.float32]]:
        """Return the text and the certainty of each strip."""
        by_width = np.argsort(widths, kind="stable")
        starts = range(0, len(widths), self.strips_per_call)
        groups = [by_width[start : start + self.strips_per_call] for start in starts]
        parts = await asyncio.gather(
            *(
                recognize(strips[group, ..., : widths[group].max()], widths[group])
                for group in groups
            )
        )
        text, score = np.empty(len(widths), np.object_), np.empty(len(widths), np.float32)
        for group, (texts, scores) in zip(groups, parts):
            text[group], score[group] = texts.as_numpy(), scores.as_numpy()
        return text, score


async def recognize(strips: npt.NDArray[np.float32], widths: npt.NDArray[np.int32]) -> list[Any]:
    """Return TEXT and SCORE of some strips of like width."""
    strip = pb_utils.Tensor("x", np.ascontiguousarray(strips))
    (probability,) = await call("text_recognizer", ["fetch_name_0"], strip)
    width = pb_utils.Tensor("WIDTH", widths)
    return await call("text_decoder", ["TEXT", "SCORE"], renamed("PROBABILITY", probability), width)


async def call(model: str, outputs: list[str], *inputs: Any) -> list[Any]:
    """Return the named outputs of a model.

    Raises
    ------
    pb_utils.TritonModelException
        The model answered with an error.
    """
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=list(inputs)
    )
    response = await request.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]


def renamed(name: str, tensor: Any) -> Any:
    """Return the tensor by another name: the same memory, wherever it lies."""
    return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
