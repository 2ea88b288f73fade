"""Post-processing: probabilities become the names of the best classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        config = json.loads(args["model_config"])
        # The file that the classifier names too, so that there is one.
        folder = Path(__file__).parents[2] / config["parameters"]["LABELS_OF"]["string_value"]
        self.names = np.array((folder / "labels.txt").read_text().split(), np.object_)
        self.best = int(config["output"][0]["dims"][0])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.name(request) for request in requests]

    def name(self, request: Any) -> Any:
        scores = pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.best]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("LABELS", self.names[best]),
                pb_utils.Tensor("PROBABILITIES", np.take_along_axis(scores, best, axis=1)),
            ]
        )
