"""Add up all responses of the decoupled model "square", of all numbers at the same time."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            try:
                sums = await asyncio.gather(*[self.add_up(number) for number in numbers])
            except CallFailed as failed:
                responses.append(pb_utils.InferenceResponse(error=failed.args[0]))
            else:
                output = pb_utils.Tensor("SUM", np.array(sums, np.int32))
                responses.append(pb_utils.InferenceResponse([output]))
        return responses

    async def add_up(self, number):
        call = pb_utils.InferenceRequest(
            model_name="square",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([number], np.int32))],
        )
        total = 0
        # async_exec gives an iterator; all calls are under way before the first is read.
        for response in await call.async_exec(decoupled=True):
            if response.has_error():
                raise CallFailed(response.error())
            for tensor in response.output_tensors():
                total += int(tensor.as_numpy()[0])
        return total


class CallFailed(Exception):
    """Carries the TritonError of a call."""
