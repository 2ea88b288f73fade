"""Takes COUNT milliseconds to answer, or less where nobody waits for the answer any more."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.wait(request) for request in requests]

    def wait(self, request):
        count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()
        until = time.monotonic() + count[0] / 1000
        while time.monotonic() < until and not request.is_cancelled():
            time.sleep(0.002)
        return pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", count)])
