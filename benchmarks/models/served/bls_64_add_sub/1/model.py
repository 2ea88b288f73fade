"""Sum and difference by 64 calls of the model "add_sub", all under way at once; all must agree."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils

CALLS = 64


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        inputs = request.inputs()
        calls = [
            pb_utils.InferenceRequest(
                model_name="add_sub",
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=inputs,
            ).async_exec()
            for _ in range(CALLS)
        ]
        answers = await asyncio.gather(*calls)
        for answer in answers:
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
        first = pb_utils.get_output_tensor_by_name(answers[0], "OUTPUT0").as_numpy()
        for answer in answers:
            total = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy()
            if not np.array_equal(total, first):
                raise RuntimeError(f"expected {first} of every call, got {total}")
        return pb_utils.InferenceResponse(answers[-1].output_tensors())
