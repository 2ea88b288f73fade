"""Post-processing: for each text the topic whose vector points most nearly in its direction."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.choose(request) for request in requests]

    def choose(self, request: Any) -> Any:
        texts, topics, names = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("TEXT_EMBEDDING", "TOPIC_EMBEDDING", "TOPIC")
        )
        similarity = texts @ topics.T
        nearest = names[similarity.argmax(axis=1), 0]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("NEAREST", nearest), pb_utils.Tensor("SIMILARITY", similarity)]
        )
