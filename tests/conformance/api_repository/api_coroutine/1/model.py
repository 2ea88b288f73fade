"""A model whose ``execute`` is a coroutine: it runs the code that it is sent."""

import asyncio  # noqa: F401  (used by the code that comes)

import numpy as np
import triton_python_backend_utils as pb_utils


def call(first, **given):
    inputs = [pb_utils.Tensor(name, np.array([first, 1], np.float32)) for name in ("A", "B")]
    return pb_utils.InferenceRequest(
        model_name="api_add", inputs=inputs, requested_output_names=["SUM"], **given
    )


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            body = "".join(f"\n    {line}" for line in code.splitlines())
            names = {**globals()}
            exec(f"async def run():{body}", names)
            said = np.array([repr(await names["run"]())], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]))
        return responses
