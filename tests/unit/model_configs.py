"""Model configurations for tests, from the text of a config.pbtxt."""

from __future__ import annotations

from pathlib import Path

from gpubridge.config import ModelConfig, complete_model_config, parse_model_config

__all__ = ["model_config"]


def model_config(inputs: str, outputs: str = "", more: str = "") -> ModelConfig:
    """Make a configuration of model ``m``; tensors are ``NAME TYPE [dims] rest`` by ``;``."""
    outputs = outputs or "OUT FP32 [-1]"
    text = 'backend: "python"\n' + more
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in filter(None, tensors.split(";")):
            name, datatype, rest = tensor.split(maxsplit=2)
            text += f'\n{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: {rest} }}'
    return complete_model_config(parse_model_config(text, "text"), Path("m"), gpu_count=0)
