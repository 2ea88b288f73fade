"""A small convolutional network: normalised pixels in, a probability for each class out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import nn

CLASSES = 16


class Network(nn.Module):
    """Three convolutions and a linear layer, with weights that a seed gives.

    Parameters
    ----------
    seed : int
        The weights are NumPy's numbers, which no release of it changes, so every machine and device has
        the same ones.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2),
        )
        self.head = nn.Linear(64, CLASSES)
        random = np.random.RandomState(seed)
        with torch.no_grad():
            for weights in self.parameters():
                fan_in = max(1, weights[0].numel())
                numbers = random.standard_normal(tuple(weights.shape)) * (2 / fan_in) ** 0.5
                # Biases stay zero, so that photographs differ by what is in them.
                weights.copy_(torch.from_numpy(numbers if weights.ndim > 1 else numbers * 0))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the probabilities, ``[images, 16]``, of ``[images, 3, 224, 224]``."""
        features = self.features(pixels).mean((2, 3))
        # What all photographs have in common says nothing about any of them.
        features = nn.functional.layer_norm(features, features.shape[1:])
        return self.head(features).softmax(1)


class TritonPythonModel:
    """Run the network on the device that the server gave to this instance."""

    def initialize(self, args: dict[str, Any]) -> None:
        if args["model_instance_kind"] == "GPU":
            self.device = torch.device("cuda", int(args["model_instance_device_id"]))
        else:
            self.device = torch.device("cpu")
        parameters = json.loads(args["model_config"])["parameters"]
        self.network = Network(int(parameters["SEED"]["string_value"])).to(self.device).eval()

    @torch.inference_mode()
    def execute(self, requests: list[Any]) -> list[Any]:
        pixels = [self.read(request) for request in requests]
        scores = self.network(pixels[0] if len(pixels) == 1 else torch.cat(pixels))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("SCORES", part)])
            for part in scores.split([len(images) for images in pixels])
        ]

    def read(self, request: Any) -> torch.Tensor:
        """Return the images as a torch tensor on this instance's device.

        DLPack hands over the memory itself, so this copies only when they lie elsewhere.
        """
        tensor = pb_utils.get_input_tensor_by_name(request, "PIXELS")
        return torch.from_dlpack(tensor).to(self.device)
