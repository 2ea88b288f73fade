"""Post-processing: logits become the name of the best label, and its probability."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        names = parameters["LABELS"]["string_value"].split(",")
        self.names = np.array([name.strip() for name in names], np.object_)

    def execute(self, requests):
        responses = []
        for request in requests:
            logits = pb_utils.get_input_tensor_by_name(request, "LOGITS").as_numpy()
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            best = shares.argmax(axis=1)[:, None]
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("LABEL", self.names[best]),
                        pb_utils.Tensor("SCORE", np.take_along_axis(shares, best, axis=1)),
                    ]
                )
            )
        return responses
