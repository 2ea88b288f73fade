"""A + B by a call of "add", checked against the number of responses that "count" sends."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        inputs = request.inputs()
        total = call("add", inputs, "SUM").exec()
        if total.has_error():
            return pb_utils.InferenceResponse(error=total.error())
        wanted = int(pb_utils.get_input_tensor_by_name(request, "A").as_numpy()[0]) % 8
        count = [pb_utils.Tensor("COUNT", np.array([wanted], np.float32))]
        got = 0
        for response in call("count", count, "INDEX").exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            got += len(response.output_tensors())
        if got != wanted:
            raise RuntimeError(f"expected {wanted} responses of count, got {got}")
        return pb_utils.InferenceResponse(total.output_tensors())


def call(model, inputs, output):
    return pb_utils.InferenceRequest(
        model_name=model, inputs=inputs, requested_output_names=[output]
    )
