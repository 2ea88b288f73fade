"""Sum and difference of two tensors by CuPy, which shares memory with the server through DLPack."""

from __future__ import annotations

from typing import Any

import cupy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.device = cupy.cuda.Device(int(args["model_instance_device_id"]))
        with self.device:
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def execute(self, requests: list[Any]) -> list[Any]:
        with self.device, self.stream:
            return [self.add_sub(request) for request in requests]

    def add_sub(self, request: Any) -> Any:
        """Answer one request: INPUT0 + INPUT1 as OUTPUT0, INPUT0 - INPUT1 as OUTPUT1.

        The answer is returned while the GPU computes: who takes it waits for the stream.
        """
        minuend, subtrahend = self.read(request, "INPUT0"), self.read(request, "INPUT1")
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor.from_dlpack("OUTPUT0", minuend + subtrahend),
                pb_utils.Tensor.from_dlpack("OUTPUT1", minuend - subtrahend),
            ]
        )

    def read(self, request: Any, name: str) -> cupy.ndarray:
        """Return an input as CuPy's array: the same memory, unless it is the host's."""
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor.is_cpu():
            return cupy.asarray(tensor.as_numpy())
        return cupy.from_dlpack(tensor.to_dlpack())
