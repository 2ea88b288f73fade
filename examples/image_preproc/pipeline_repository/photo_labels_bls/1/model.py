"""The three models one after the other, called by a fourth: what the ensemble does, in Python.

The tensors are handed on as they came and never looked at, so those on a GPU stay there.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

STEPS = (
    ("image_preproc", ["PIXELS"]),
    ("classifier", ["SCORES"]),
    ("top_labels", ["LABELS", "PROBABILITIES"]),
)


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        tensors = [pb_utils.get_input_tensor_by_name(request, "IMAGE")]
        for model, outputs in STEPS:
            call = pb_utils.InferenceRequest(
                model_name=model, requested_output_names=outputs, inputs=tensors
            )
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensors = response.output_tensors()
        return pb_utils.InferenceResponse(tensors)
