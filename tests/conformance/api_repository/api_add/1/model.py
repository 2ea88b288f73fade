"""Called by the other models: a sum, and what it saw of its request. A[0] < 0 asks for trouble."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
        if first[0] == -1:
            raise ValueError("minus one")
        if first[0] == -2:
            error = pb_utils.TritonError("minus two", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        seen = [
            request.request_id(),
            request.correlation_id(),
            request.flags(),
            request.timeout(),
            request.parameters(),
            sorted(request.requested_output_names()),
            [tensor.name() for tensor in request.inputs()],
            request.is_cancelled(),
        ]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("SUM", first + second),
                pb_utils.Tensor("SEEN", np.array([repr(seen)], np.object_)),
            ]
        )
