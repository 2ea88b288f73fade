"""A line for the shell that asks a model once: what its user tries first."""

from __future__ import annotations

import json
from math import prod
from shlex import quote
from typing import Any
from urllib.parse import quote as quote_url

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.tensor.dtypes import item_size

_WRITTEN_OUT = 16
"""Elements of an input that are shown; more of them come from a program."""
_MOST_ELEMENTS = 1 << 22
"""Elements of all inputs that a first request has; more of them are no quick question."""
_BINARY_ONLY = ("FP16", "BF16")
_SEQUENCE = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}


def curl_line(config: ModelConfig, url: str) -> str:
    """Return a ``curl`` command that the model at ``url``, the server's, can take.

    Empty where there is none: a decoupled model with inputs that JSON cannot carry, or very large inputs.
    """
    model = f"{url}/v2/models/{quote_url(config.name, safe='')}"
    inputs = [spec for spec in config.inputs if not spec.optional] or list(config.inputs[:1])
    if sum(_count(spec, config) for spec in inputs) > _MOST_ELEMENTS:
        return ""
    sequence = config.message.WhichOneof("scheduling_choice") == "sequence_batching"
    parameters = _SEQUENCE if sequence else {}
    binary = any(spec.datatype in _BINARY_ONLY for spec in inputs)
    if config.decoupled:
        return "" if binary else _stream(config, inputs, parameters, f"{model}/generate_stream")
    request: dict[str, Any] = {"inputs": [_input(spec, config) for spec in inputs]}
    answer = ""
    if any(spec.datatype in _BINARY_ONLY for spec in config.outputs):
        parameters = {**parameters, "binary_data_output": True}
        answer = "-o answer.bin "
    if parameters:
        request["parameters"] = parameters
    if not binary and all(_count(spec, config) <= _WRITTEN_OUT for spec in inputs):
        for tensor, spec in zip(request["inputs"], inputs, strict=True):
            tensor["data"] = _values(spec, config)
        return f"curl {answer}-d {quote(json.dumps(request))} {quote(model)}/infer"
    # Zeros of as many bytes are a tensor of any type: of strings they are empty ones.
    sizes = [_count(spec, config) * (item_size(spec.datatype) or 4) for spec in inputs]
    for tensor, nbytes in zip(request["inputs"], sizes, strict=True):
        tensor["parameters"] = {"binary_data_size": nbytes}
    head = json.dumps(request)
    return (
        f"{{ printf %s {quote(head)}; head -c {sum(sizes)} /dev/zero; }} | curl {answer}-H "
        f"'Inference-Header-Content-Length: {len(head)}' --data-binary @- {quote(model)}/infer"
    )


def _stream(
    config: ModelConfig, inputs: list[TensorSpec], parameters: dict[str, Any], url: str
) -> str:
    """Return the command for a decoupled model, whose responses are a stream."""
    values = {spec.name: _values(spec, config) for spec in inputs}
    many = [spec for spec in inputs if _count(spec, config) > _WRITTEN_OUT]
    places = {spec.name: f"<{index}>" for index, spec in enumerate(many)}
    body = quote(json.dumps({**parameters, **values, **places}))
    if not many:
        return f"curl -N -d {body} {quote(url)}"
    for spec in many:
        value, count = quote(json.dumps(values[spec.name][0])), _count(spec, config)
        repeated = f"""['"$(yes {value} | head -n {count} | paste -sd ,)"']"""
        body = body.replace(f'"{places[spec.name]}"', repeated)
    return f"printf %s {body} | curl -N --data-binary @- {quote(url)}"


def _input(spec: TensorSpec, config: ModelConfig) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": _shape(spec, config)}


def _shape(spec: TensorSpec, config: ModelConfig) -> list[int]:
    """Return the smallest shape that the input can have."""
    batch = [1] if config.max_batch_size else []
    return [*batch, *(max(dim, 1) for dim in spec.dims)]


def _count(spec: TensorSpec, config: ModelConfig) -> int:
    return prod(_shape(spec, config))


def _values(spec: TensorSpec, config: ModelConfig) -> list[Any]:
    value: Any = {"BYTES": "text", "BOOL": True}.get(spec.datatype, 1)
    return [value] * min(_count(spec, config), _WRITTEN_OUT)
