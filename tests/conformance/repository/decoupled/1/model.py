"""Decoupled: sends COUNT responses (the numbers 0 .. COUNT - 1), then the final flag."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                value = np.array([number], dtype=np.int32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", value)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
