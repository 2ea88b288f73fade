"""Asks for the place of its output and writes nothing: what is timed is the bridge alone."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            answer = request.output("OUTPUT0", given.shape(), np.float32, device="cuda")
            responses.append(pb_utils.InferenceResponse([answer]))
        return responses
