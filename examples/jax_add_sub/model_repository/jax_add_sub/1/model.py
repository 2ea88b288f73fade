"""Sum and difference of two tensors by JAX."""

import jax
import numpy as np
import triton_python_backend_utils as pb_utils


@jax.jit
def add_sub(minuend, subtrahend):
    return minuend + subtrahend, minuend - subtrahend


class TritonPythonModel:
    def initialize(self, args):
        # Compiled here, so that the first request does not wait for it.
        example = np.zeros(4, np.float32)
        jax.block_until_ready(add_sub(example, example))

    def execute(self, requests):
        responses = []
        for request in requests:
            minuend = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            subtrahend = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            total, difference = add_sub(minuend, subtrahend)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUTPUT0", np.asarray(total)),
                        pb_utils.Tensor("OUTPUT1", np.asarray(difference)),
                    ]
                )
            )
        return responses
