"""Call a model twice at the same time: (a + b) + (a - b) and (a + b) - (a - b), or 2 a and 2 b."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
        first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        # Both calls are under way before either is waited for.
        answers = await asyncio.gather(
            self.call(model, first, second, "OUTPUT0"), self.call(model, first, second, "OUTPUT1")
        )
        for answer in answers:
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
        total, difference = (answer.output_tensors()[0].as_numpy() for answer in answers)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("OUTPUT0", total + difference),
                pb_utils.Tensor("OUTPUT1", total - difference),
            ]
        )

    def call(self, model, first, second, output):
        request = pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=[output],
            inputs=[pb_utils.Tensor("INPUT0", first), pb_utils.Tensor("INPUT1", second)],
        )
        return request.async_exec()
