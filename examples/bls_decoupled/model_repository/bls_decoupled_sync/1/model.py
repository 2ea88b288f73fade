"""Add up all responses of the decoupled model "square": each number becomes its square."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            try:
                sums = np.array([self.add_up(number) for number in numbers], np.int32)
            except CallFailed as failed:
                responses.append(pb_utils.InferenceResponse(error=failed.args[0]))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sums)]))
        return responses

    def add_up(self, number):
        call = pb_utils.InferenceRequest(
            model_name="square",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([number], np.int32))],
        )
        total = 0
        # The responses are here as they come; the last may be empty and only say that it is the last.
        for response in call.exec(decoupled=True):
            if response.has_error():
                raise CallFailed(response.error())
            for tensor in response.output_tensors():
                total += int(tensor.as_numpy()[0])
        return total


class CallFailed(Exception):
    """Carries the TritonError of a call."""
