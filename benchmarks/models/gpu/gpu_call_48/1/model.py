"""Calls another model with 48 tensors on the GPU, and tells how many came back there."""

import importlib

import numpy as np
import triton_python_backend_utils as pb_utils

COUNT = 48
ELEMENTS = 16384


def arrays():
    """Make the tensors in a framework's memory, as models have them."""
    values = [np.full(ELEMENTS, i, np.float32) for i in range(COUNT)]
    cupy = framework("cupy")
    if cupy is not None:
        return [cupy.asarray(array) for array in values]
    torch = framework("torch")
    if torch is not None and torch.cuda.is_available():
        return [torch.as_tensor(array, device="cuda") for array in values]
    # Only gpubridge has memory of its own to give.
    names = [f"IN{i}" for i in range(COUNT)]
    return [pb_utils.Tensor.empty(n, [ELEMENTS], np.float32, device="cuda") for n in names]


def framework(name):
    """Import a framework; None where it is not, or does not work with what else is there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class TritonPythonModel:
    def initialize(self, _):
        self.arrays = arrays()

    def execute(self, requests):
        return [self.answer() for _ in requests]

    def answer(self):
        call = pb_utils.InferenceRequest(
            model_name="gpu_many_48",
            requested_output_names=[f"OUT{i}" for i in range(COUNT)],
            inputs=[
                pb_utils.Tensor.from_dlpack(f"IN{i}", array) for i, array in enumerate(self.arrays)
            ],
        )
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        there = sum(not tensor.is_cpu() for tensor in answer.output_tensors())
        told = pb_utils.Tensor("OUTPUT0", np.array([there], np.float32))
        return pb_utils.InferenceResponse([told])
