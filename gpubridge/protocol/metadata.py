"""The v2 documents that describe the server and its models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

import gpubridge
from gpubridge.config import ModelConfig, TensorSpec

__all__ = ["SERVER_NAME", "model_config", "model_metadata", "repository_index", "server_metadata"]

SERVER_NAME = "gpubridge"

_EXTENSIONS = ("model_configuration", "binary_tensor_data", "parameters")


def server_metadata() -> bytes:
    """Return the server's name, version and the extensions that it serves."""
    return orjson.dumps(
        {
            "name": SERVER_NAME,
            "version": gpubridge.__version__,
            "extensions": _EXTENSIONS,
        }
    )


def model_metadata(config: ModelConfig, versions: Sequence[int]) -> bytes:
    """Return a model's versions and tensors; with batching the first dim of each shape is -1."""
    batched = config.max_batch_size > 0
    return orjson.dumps(
        {
            "name": config.name,
            "versions": [str(version) for version in versions],
            "platform": config.backend,
            "inputs": [_tensor(spec, batched) for spec in config.inputs],
            "outputs": [_tensor(spec, batched) for spec in config.outputs],
        }
    )


def model_config(config: ModelConfig) -> bytes:
    """Return a model's configuration with all defaults, as Triton spells it."""
    return orjson.dumps(config.to_dict())


def repository_index(rows: Iterable[Any]) -> bytes:
    """Return the repository index; ``rows`` have name, version, state and reason."""
    index = []
    for row in rows:
        entry = {"name": row.name}
        if row.version:
            entry["version"] = str(row.version)
        entry["state"] = row.state
        if row.reason:
            entry["reason"] = row.reason
        index.append(entry)
    return orjson.dumps(index)


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    shape = [-1, *spec.dims] if batched else list(spec.dims)
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}
