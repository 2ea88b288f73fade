"""INPUT0, and the 99 numbers after it: one response for each."""

import numpy as np
import triton_python_backend_utils as pb_utils

RESPONSES = 100


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            for number in range(RESPONSES):
                output = pb_utils.Tensor("OUTPUT0", first + np.int32(number))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
