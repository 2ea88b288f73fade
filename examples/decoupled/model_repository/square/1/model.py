"""Send IN as many times as it says: 3 is answered by 3, 3, 3, and 0 by nothing.

The response sender is used inside of ``execute``; the last response carries the final flag.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if number < 0:
                error = pb_utils.TritonError(
                    f"expected 0 or more, got {number}", pb_utils.TritonError.INVALID_ARG
                )
                sender.send(pb_utils.InferenceResponse(error=error), FINAL)
                continue
            if number == 0:
                sender.send(flags=FINAL)
            for sent in range(1, number + 1):
                output = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([output]), FINAL if sent == number else 0)
