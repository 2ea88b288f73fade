"""Shell commands that send a model its first request."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from shlex import quote
from typing import Any
from urllib.parse import quote as quote_url

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.config.model_config import ModelSettings
from gpubridge.protocol.example_inputs import (
    WRITTEN_OUT,
    example_values,
    needed_inputs,
    smallest_count,
    smallest_shape,
)
from gpubridge.tensor.datatypes import item_size

_MOST_ELEMENTS = 1 << 22
"""Maximum elements of all inputs of a command."""
_SHOWN = 1 << 10
"""Elements of an output shown on a terminal; longer outputs are written to a file."""
_BINARY_ONLY = ("FP16", "BF16")
_SEQUENCE = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}

_IMAGE_BACKEND = "image_preproc"
_IMAGE_NAME = re.compile(r"image|img|photo|picture|jpe?g|png", re.IGNORECASE)
_IMAGES = {
    "png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg==",
    "jpeg": "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAP//////////////////////////////////////////////////////////"
    "////////////////////////////wAALCAABAAEBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABQQAQAAAAAAAAAAAAAAAAAA"
    "AAD/2gAIAQEAAD8AP//Z",
    "webp": "UklGRh4AAABXRUJQVlA4TBEAAAAvAAAAAAdQwAIWsP+BiOh/AAA=",
    "tiff": "SUkqAAgAAAAJAAABBAABAAAAAQAAAAEBBAABAAAAAQAAAAIBAwABAAAACAAAAAMBAwABAAAAAQAAAAYBAwABAAAAAQAAABEB"
    "BAABAAAAegAAABYBBAABAAAAAQAAABcBBAABAAAAAQAAABwBAwABAAAAAQAAAAAAAACA",
}
"""Images of one pixel, in base64."""


def curl_line(config: ModelConfig, url: str, others: Mapping[str, ModelConfig]) -> str:
    """Return a ``curl`` command for a model of the server at ``url``.

    Empty for a decoupled model with inputs that JSON cannot represent, and for very large inputs.

    ``others``: the configurations of all models, by name.
    """
    declared = ModelSettings.from_parameters(config.parameters, config.name).openai
    if declared:
        return _openai_line(config.name, declared.split(",")[0], url)
    model = f"{url}/v2/models/{quote_url(config.name, safe='')}"
    inputs = needed_inputs(config)
    if sum(smallest_count(spec, config) for spec in inputs) > _MOST_ELEMENTS:
        return ""
    sequence = config.message.WhichOneof("scheduling_choice") == "sequence_batching"
    parameters = _SEQUENCE if sequence else {}
    images = {spec.name: _image(spec, config, others) for spec in inputs}
    binary = any(spec.datatype in _BINARY_ONLY or images[spec.name] for spec in inputs)
    if config.decoupled:
        return "" if binary else _stream(config, inputs, parameters, f"{model}/generate_stream")
    request: dict[str, Any] = {"inputs": [_input(spec, config) for spec in inputs]}
    answer = ""
    if any(
        s.datatype in _BINARY_ONLY or smallest_count(s, config) > _SHOWN for s in config.outputs
    ):
        parameters = {**parameters, "binary_data_output": True}
        answer = "-o answer.bin "
    if parameters:
        request["parameters"] = parameters
    if not binary and all(smallest_count(spec, config) <= WRITTEN_OUT for spec in inputs):
        for tensor, spec in zip(request["inputs"], inputs, strict=True):
            tensor["data"] = example_values(spec, config)
        return f"curl {answer}-d {quote(json.dumps(request))} {quote(model)}/infer"
    pieces = []
    for tensor, spec in zip(request["inputs"], inputs, strict=True):
        nbytes, piece = _binary(images[spec.name], smallest_count(spec, config), spec)
        tensor["parameters"] = {"binary_data_size": nbytes}
        pieces.append(piece)
    head = json.dumps(request)
    return (
        f"{{ printf %s {quote(head)}; {'; '.join(pieces)}; }} | curl {answer}-H "
        f"'Inference-Header-Content-Length: {len(head)}' --data-binary @- {quote(model)}/infer"
    )


def _openai_line(model: str, endpoint: str, url: str) -> str:
    """Return the command for a model of OpenAI's API, whose inputs hold requests of that."""
    path, body = _OPENAI[endpoint]
    request = quote(json.dumps({"model": model, **body}))
    return f"curl -H 'Content-Type: application/json' -d {request} {quote(url)}/v1/{path}"


_OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
    "completions": ("completions", {"prompt": "text"}),
    "embeddings": ("embeddings", {"input": "text"}),
}


def _binary(image: bytes, count: int, spec: TensorSpec) -> tuple[int, str]:
    """Return the size of an input, and a command that writes its bytes."""
    if image:
        data = base64.b64encode(count * (len(image).to_bytes(4, "little") + image)).decode()
        return count * (4 + len(image)), f"echo {data} | base64 -d"
    # Zeros are valid for any datatype: for BYTES they are empty strings.
    nbytes = count * (item_size(spec.datatype) or 4)
    return nbytes, f"head -c {nbytes} /dev/zero"


def _image(spec: TensorSpec, config: ModelConfig, others: Mapping[str, ModelConfig]) -> bytes:
    """Return an image for an input that expects images, else nothing."""
    if spec.datatype != "BYTES" or smallest_count(spec, config) > WRITTEN_OUT:
        return b""
    if config.backend == _IMAGE_BACKEND:
        known = re.findall(r"\w+", config.parameters.get("FORMATS", "png").lower())
        return next(base64.b64decode(text) for name, text in _IMAGES.items() if name in known)
    for step in config.message.ensemble_scheduling.step:
        member = others.get(step.model_name)
        for name, tensor in step.input_map.items():
            taken = None if member is None else member.inputs_by_name.get(name)
            if tensor == spec.name and member is not None and taken is not None:
                return _image(taken, member, others)
    return base64.b64decode(_IMAGES["png"]) if _IMAGE_NAME.search(spec.name) else b""


def _stream(
    config: ModelConfig, inputs: list[TensorSpec], parameters: dict[str, Any], url: str
) -> str:
    """Return the command for a decoupled model, whose responses are a stream."""
    values = {spec.name: example_values(spec, config) for spec in inputs}
    many = [spec for spec in inputs if smallest_count(spec, config) > WRITTEN_OUT]
    places = {spec.name: f"<{index}>" for index, spec in enumerate(many)}
    body = quote(json.dumps({**parameters, **values, **places}))
    if not many:
        return f"curl -N -d {body} {quote(url)}"
    for spec in many:
        value, count = quote(json.dumps(values[spec.name][0])), smallest_count(spec, config)
        repeated = f"""['"$(yes {value} | head -n {count} | paste -sd ,)"']"""
        body = body.replace(f'"{places[spec.name]}"', repeated)
    return f"printf %s {body} | curl -N --data-binary @- {quote(url)}"


def _input(spec: TensorSpec, config: ModelConfig) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": smallest_shape(spec, config)}
