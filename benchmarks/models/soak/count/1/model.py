"""COUNT responses, from a thread of its own: 0, 1, 2 and so on, until nobody listens."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=answer, args=(request,), daemon=True).start()


def answer(request):
    sender = request.get_response_sender()
    count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
    for index in range(count):
        if sender.is_cancelled():
            break
        output = pb_utils.Tensor("INDEX", np.array([index], np.float32))
        sender.send(pb_utils.InferenceResponse([output]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
