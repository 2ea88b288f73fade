"""Sum and difference of two tensors by a PyTorch module, without NumPy in between."""

from __future__ import annotations

from typing import Any

import torch
import triton_python_backend_utils as pb_utils


class AddSub(torch.nn.Module):
    """Add and subtract: the smallest module with two inputs and two outputs."""

    def forward(
        self, minuend: torch.Tensor, subtrahend: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return minuend + subtrahend, minuend - subtrahend


class TritonPythonModel:
    """Run ``AddSub`` on the device that the server gave to this instance."""

    def initialize(self, args: dict[str, Any]) -> None:
        if args["model_instance_kind"] == "GPU":
            self.device = torch.device("cuda", int(args["model_instance_device_id"]))
        else:
            self.device = torch.device("cpu")
        self.module = AddSub().to(self.device).eval()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.add_sub(request) for request in requests]

    @torch.inference_mode()
    def add_sub(self, request: Any) -> Any:
        """Answer one request: INPUT0 + INPUT1 as OUTPUT0, INPUT0 - INPUT1 as OUTPUT1."""
        total, difference = self.module(self.read(request, "INPUT0"), self.read(request, "INPUT1"))
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor.from_dlpack("OUTPUT0", total),
                pb_utils.Tensor.from_dlpack("OUTPUT1", difference),
            ]
        )

    def read(self, request: Any, name: str) -> torch.Tensor:
        """Return an input as a torch tensor on this instance's device.

        DLPack hands over the memory itself, so this copies only when the input lies elsewhere.
        """
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return torch.from_dlpack(tensor).to(self.device)
