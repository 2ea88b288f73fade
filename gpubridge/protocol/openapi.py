"""The OpenAPI document's parts: the paths of a model, by its configuration, and schemas of values."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.protocol.example_inputs import (
    WRITTEN_OUT,
    example_values,
    generate_example,
    needed_inputs,
    smallest_count,
    smallest_shape,
)
from gpubridge.protocol.fields import JsonObject
from gpubridge.tensor.datatypes import DATATYPES

MOST_TENSORS = 256
"""Inputs and outputs of a model up to which the document has it."""
_BINARY_ONLY = ("FP16", "BF16")
_ERRORS = {
    "4XX": {"$ref": "#/components/responses/Error"},
    "5XX": {"$ref": "#/components/responses/Error"},
}


def openapi_head(name: str, version: str, left_out: int) -> JsonObject:
    """Return the document without its paths; ``left_out``: models that it does not have."""
    text = "The ready models of this server. Large tensors are sent as binary data instead of JSON."
    if left_out:
        text += (
            f" {left_out} models with many tensors, or beyond the document's size, are left out."
        )
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": name, "version": version, "description": text},
        "components": {
            "schemas": {datatype: _values(datatype) for datatype in DATATYPES} | {"Error": error},
            "responses": {
                "Error": {
                    "description": "what was expected, what came, and where",
                    "content": _json({"$ref": "#/components/schemas/Error"}),
                }
            },
        },
    }


def model_paths(config: ModelConfig) -> dict[str, JsonObject]:
    """Return the paths of a model that are asked for inference."""
    model = f"/v2/models/{quote(config.name, safe='')}"
    generate, schema = f"{model}/generate", _generate(config)
    paths: dict[str, JsonObject] = {}
    if not config.decoupled:
        paths[f"{model}/infer"] = _operation(config, "infer", _infer(config), _inferred(config))
        paths[generate] = _operation(config, "generate", schema, _json(_generated(config)))
    return {
        **paths,
        f"{generate}_stream": _operation(config, "generate_stream", schema, _events()),
    }


def _operation(
    config: ModelConfig, action: str, request: JsonObject, response: JsonObject
) -> JsonObject:
    return {
        "post": {
            "tags": [config.name],
            "operationId": f"{action}:{config.name}",
            "summary": f"{action} of {config.name}",
            "requestBody": {"required": True, "content": request},
            "responses": {
                "200": {"description": "the outputs of the model", "content": response},
                **_ERRORS,
            },
        }
    }


def _json(schema: JsonObject, example: JsonObject | None = None) -> JsonObject:
    return {
        "application/json": {"schema": schema} | ({} if example is None else {"example": example})
    }


def _events() -> JsonObject:
    text = "each event is `data: ` and an object as of `generate`, or an error"
    return {"text/event-stream": {"schema": {"type": "string", "description": text}}}


# -- infer ---------------------------------------------------------------------------------------------


def _infer(config: ModelConfig) -> JsonObject:
    needed = [spec for spec in config.inputs if not spec.optional]
    tensors = _tensors(config.inputs, config, given=True)
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {**tensors, "minItems": len(needed), "maxItems": len(config.inputs)},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"enum": [spec.name for spec in config.outputs]}},
                }
                if config.outputs
                else False,
            },
        },
    }
    asked = needed_inputs(config)
    short = all(
        spec.datatype not in _BINARY_ONLY and smallest_count(spec, config) <= WRITTEN_OUT
        for spec in asked
    )
    inputs = [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": smallest_shape(spec, config),
            "data": example_values(spec, config),
        }
        for spec in asked
    ]
    return _json(schema, {"inputs": inputs} if short else None)


def _inferred(config: ModelConfig) -> JsonObject:
    properties = {
        **_model_members(),
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "outputs": _tensors(config.outputs, config, given=False),
    }
    required = ["model_name", "model_version", "outputs"]
    return _json({"type": "object", "required": required, "properties": properties})


def _model_members() -> JsonObject:
    return {"model_name": {"type": "string"}, "model_version": {"type": "string"}}


def _tensors(specs: Sequence[TensorSpec], config: ModelConfig, *, given: bool) -> JsonObject:
    """Return the schema of a list of tensors; ``given``: by the client."""
    return {
        "type": "array",
        "items": {"anyOf": [_tensor(spec, config, given) for spec in specs]} if specs else False,
    }


def _tensor(spec: TensorSpec, config: ModelConfig, given: bool) -> JsonObject:
    dims = [-1, *spec.dims] if config.max_batch_size else [*spec.dims]
    shape = [
        {"const": dim} if dim >= 0 and given else {"type": "integer", "minimum": 0} for dim in dims
    ]
    if config.max_batch_size:
        shape[0] = {"type": "integer", "minimum": 1, "maximum": config.max_batch_size}
    required = ["name", "datatype", "shape"]
    if given and spec.datatype not in _BINARY_ONLY:
        required.append("data")
    return {
        "type": "object",
        "required": required,
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                **({"prefixItems": shape} if shape else {}),
                **({"minItems": len(dims), "maxItems": len(dims)} if given else {}),
            },
            "data": {"$ref": f"#/components/schemas/{spec.datatype}"},
            "parameters": {"type": "object"},
        },
    }


# -- generate --------------------------------------------------------------------------------------------


def _generate(config: ModelConfig) -> JsonObject:
    schema = {
        "type": "object",
        "required": [spec.name for spec in config.inputs if not spec.optional],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            **{spec.name: _flat(spec) for spec in config.inputs},
        },
    }
    short = all(smallest_count(spec, config) <= WRITTEN_OUT for spec in needed_inputs(config))
    return _json(schema, generate_example(config, MOST_TENSORS) if short else None)


def _generated(config: ModelConfig) -> JsonObject:
    members = {**_model_members(), **{spec.name: _flat(spec) for spec in config.outputs}}
    return {"type": "object", "required": [*_model_members()], "properties": members}


# -- values ----------------------------------------------------------------------------------------------


def _flat(spec: TensorSpec) -> JsonObject:
    """Return the schema of a tensor in a generate request: a value, or a flat list."""
    value = _value(spec.datatype)
    return {"anyOf": [value, {"type": "array", "items": value}]}


def _values(datatype: str) -> JsonObject:
    """Return the schema of the values of a tensor, flat or nested as its shape."""
    nested = {"$ref": f"#/components/schemas/{datatype}"}
    schema = {"type": "array", "items": {"anyOf": [_value(datatype), nested]}}
    if datatype in _BINARY_ONLY:
        schema["description"] = "is sent as binary data: JSON has no values of this datatype"
    return schema


def _value(datatype: str) -> JsonObject:
    if datatype == "BYTES":
        return {"type": "string"}
    if datatype == "BOOL":
        return {"type": "boolean"}
    digits = datatype.lstrip("UINTFPB")
    if "INT" not in datatype:
        return {"type": "number"}
    bits = int(digits)
    signed = not datatype.startswith("U")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return {"type": "integer", "minimum": low, "maximum": high}
