"""The three models one after the other, called by a fourth: what the ensemble does, in Python.

Between the calls there may be any decision; here none is needed, and the tensors go from model to
model as they are.
"""

import triton_python_backend_utils as pb_utils

STEPS = (("tokenizer", ["IDS"]), ("classifier", ["LOGITS"]), ("labels", ["LABEL", "SCORE"]))


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = [pb_utils.get_input_tensor_by_name(request, "TEXT")]
        for model, outputs in STEPS:
            call = pb_utils.InferenceRequest(
                model_name=model, requested_output_names=outputs, inputs=tensors
            )
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensors = response.output_tensors()
        return pb_utils.InferenceResponse(tensors)
