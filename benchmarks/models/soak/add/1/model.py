"""The sum of two vectors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("SUM", read(request, "A") + read(request, "B"))]
            )
            for request in requests
        ]


def read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
