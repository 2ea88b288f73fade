"""The sum of all values of a sequence so far; there are batches in which it has no request."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def __init__(self):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        total = self.count(request) if read(request, "READY") else 0
        output = pb_utils.Tensor("TOTAL", np.array([[total]], np.int64))
        return pb_utils.InferenceResponse([output])

    def count(self, request):
        sequence = request.correlation_id()
        starts, ends, value = (read(request, name) for name in ("START", "END", "VALUE"))
        total = value if starts else self.totals[sequence] + value
        self.totals[sequence] = total
        if ends:
            del self.totals[sequence]
        return total


def read(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0])
