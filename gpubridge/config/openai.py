"""Endpoints of OpenAI's API that a model serves, by its parameter OPENAI and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from gpubridge.config.model_config import ModelConfig, ModelSettings, TensorSpec
from gpubridge.errors import invalid

REQUEST_INPUT = "openai_request"
"""The request's body, as JSON."""
TEXT_INPUT = "text_input"
"""The prompt of a completion, or the texts to embed."""
TEXT_OUTPUT = "text_output"
"""A piece of the answer's text."""
FIELDS_OUTPUT = "openai_response"
"""Other members of the answer, as JSON."""
EMBEDDING_OUTPUT = "embedding"
"""A row of FP32 numbers for each text."""

_NEEDED = {
    "chat": ((REQUEST_INPUT,), (TEXT_OUTPUT, FIELDS_OUTPUT), "BYTES"),
    "completions": ((REQUEST_INPUT, TEXT_INPUT), (TEXT_OUTPUT, FIELDS_OUTPUT), "BYTES"),
    "embeddings": ((REQUEST_INPUT, TEXT_INPUT), (EMBEDDING_OUTPUT,), "FP32"),
}
"""By endpoint: the BYTES inputs of which it needs one; its outputs, likewise, and their datatype."""


def openai_endpoints(config: ModelConfig) -> tuple[str, ...]:
    """Return the endpoints that a model serves: those of its parameter, or completions by its tensors.

    Raises BridgeError: INVALID_ARG for a wrong value of the parameter.
    """
    declared = ModelSettings.from_parameters(config.parameters, config.name).openai
    if declared:
        return tuple(declared.split(","))
    reads = _has(config.inputs_by_name, TEXT_INPUT, "BYTES")
    return ("completions",) if reads and _has(config.outputs_by_name, TEXT_OUTPUT, "BYTES") else ()


def check_openai(config: ModelConfig) -> None:
    """Raise INVALID_ARG if a model lacks a tensor that its parameter OPENAI requires."""
    for endpoint in openai_endpoints(config):
        inputs, outputs, datatype = _NEEDED[endpoint]
        for kind, specs, names, wanted in (
            ("input", config.inputs_by_name, inputs, "BYTES"),
            ("output", config.outputs_by_name, outputs, datatype),
        ):
            if not any(_has(specs, name, wanted) for name in names):
                raise invalid(
                    f"model '{config.name}' declares OPENAI '{endpoint}': expected an {kind} "
                    f"{' or '.join(names)} of datatype {wanted}"
                )


def _has(specs: Mapping[str, TensorSpec], name: str, datatype: str) -> bool:
    spec = specs.get(name)
    return spec is not None and spec.datatype == datatype
