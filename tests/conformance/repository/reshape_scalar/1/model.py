"""Identity that also tells, as text, the shape that execute saw."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            seen = np.array([str(list(data.shape)).encode()], dtype=np.object_).reshape(1, 1)
            outputs = [pb_utils.Tensor("OUTPUT", data), pb_utils.Tensor("SEEN", seen)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
