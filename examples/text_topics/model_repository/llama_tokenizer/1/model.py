"""Pre-processing: texts become tokens of Llama 2's vocabulary, by Hugging Face's tokenizers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        # The file is in the package, whose code is not needed.
        found = importlib.util.find_spec("wordllama")
        if found is None or found.origin is None:
            raise ImportError("expected the package wordllama: pip install --no-deps wordllama")
        file = Path(found.origin).parent / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.enable_truncation(int(parameters["MAX_TOKENS"]["string_value"]))
        self.tokenizer.enable_padding()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.tokenize(request) for request in requests]

    def tokenize(self, request: Any) -> Any:
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
        try:
            decoded = [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            message = f"TEXT: expected UTF-8, got bytes that are not: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
        encoded = self.tokenizer.encode_batch(decoded, add_special_tokens=False)
        tokens = np.array([one.ids for one in encoded], np.int32)
        mask = np.array([one.attention_mask for one in encoded], np.int32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TOKENS", tokens), pb_utils.Tensor("MASK", mask)]
        )
