"""The model: a text's vector is the mean of its tokens' vectors, which WordLlama's authors trained for that."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from safetensors.numpy import load_file


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        found = importlib.util.find_spec("wordllama")
        if found is None or found.origin is None:
            raise ImportError("expected the package wordllama: pip install --no-deps wordllama")
        file = Path(found.origin).parent / "weights" / "l2_supercat_256.safetensors"
        self.vectors = load_file(file)["embedding.weight"].astype(np.float32)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.embed(request) for request in requests]

    def embed(self, request: Any) -> Any:
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "MASK").as_numpy()
        total = np.einsum("ntd,nt->nd", self.vectors[tokens], mask.astype(np.float32))
        length = np.linalg.norm(total, axis=1, keepdims=True)
        embedding = total / np.maximum(length, np.finfo(np.float32).tiny)
        return pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", embedding)])
