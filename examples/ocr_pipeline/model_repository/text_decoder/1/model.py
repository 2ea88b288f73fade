"""Recognition's post-processing: CTC's best path, from probabilities of characters to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        config = json.loads(args["model_config"])
        self.min_score = float(config["parameters"]["MIN_SCORE"]["string_value"])
        # Class 0 is "nothing", the last one is the space.
        listed = (Path(__file__).parent / "characters.txt").read_text(encoding="utf-8")
        self.characters = np.array(["", *listed.split("\n"), " "], np.object_)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        probability = pb_utils.get_input_tensor_by_name(request, "PROBABILITY").as_numpy()
        widths = pb_utils.get_input_tensor_by_name(request, "WIDTH").as_numpy()
        # The strip of an image without text has no width.
        read = [self.decode(one) for one in probability[: len(widths)]]
        texts = [text if score >= self.min_score else "" for text, score in read]
        scores = [score for _, score in read]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TEXT", np.array(texts, np.object_)),
                pb_utils.Tensor("SCORE", np.array(scores, np.float32)),
            ]
        )

    def decode(self, probability: npt.NDArray[np.float32]) -> tuple[str, float]:
        """Return the text of ``[steps, classes]`` and the mean probability of its characters."""
        best = probability.argmax(axis=1)
        # A character that lasts for several steps is one, unless "nothing" comes between.
        new = np.append(True, best[1:] != best[:-1]) & (best != 0)
        if not new.any():
            return "", 0.0
        text = "".join(self.characters[best[new]])
        return text.strip(), float(probability[new, best[new]].mean())
