"""Call the model that the client names, and answer what it answers."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.pass_on(request) for request in requests]

    def pass_on(self, request):
        model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
        call = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=["OUTPUT0", "OUTPUT1"],
            inputs=[
                pb_utils.get_input_tensor_by_name(request, "INPUT0"),
                pb_utils.get_input_tensor_by_name(request, "INPUT1"),
            ],
        )
        answer = call.exec()
        if answer.has_error():
            # What went wrong there is what the client of this model is told.
            return pb_utils.InferenceResponse(error=answer.error())
        # The tensors go on as they are: nothing looks at their contents here.
        return pb_utils.InferenceResponse(answer.output_tensors())
