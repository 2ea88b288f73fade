"""Returns every input it was given: IN_<dtype> comes back as OUT_<dtype>, untouched."""

import triton_python_backend_utils as pb_utils


def echo(tensor):
    name = tensor.name().replace("IN_", "OUT_")
    if tensor.name() == "IN_STRING":  # DLPack has no strings, numpy has no BF16
        return pb_utils.Tensor(name, tensor.as_numpy())
    return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([echo(tensor) for tensor in request.inputs()])
            for request in requests
        ]
