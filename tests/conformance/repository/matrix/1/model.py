"""Two-dimensional identity: variable (M), fixed 2 x 2 (F) and strings (S)."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT_" + t.name()[3:], t.as_numpy()) for t in request.inputs()]
            )
            for request in requests
        ]
