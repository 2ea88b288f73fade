"""Each string with its bytes in reverse order."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([turned(request)]) for request in requests]


def turned(request):
    texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
    made = np.empty(texts.shape, np.object_)
    made.flat = [text[::-1] for text in texts.flat]
    return pb_utils.Tensor("TURNED", made)
