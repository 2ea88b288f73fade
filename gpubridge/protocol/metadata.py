"""Documents of v2 that describe the server and its models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gpubridge
from gpubridge.config import ModelConfig, TensorSpec
from gpubridge.protocol.fields import JsonObject, parse_json, wrong_type
from gpubridge.telemetry.statistics import ModelStatistics

_EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    # Identifies this server, whose name can be configured.
    f"gpubridge({gpubridge.__version__})",
)


def server_metadata(name: str) -> JsonObject:
    """Return the server's name, version and extensions."""
    return {"name": name, "version": gpubridge.__version__, "extensions": _EXTENSIONS}


def model_metadata(config: ModelConfig, versions: Sequence[int]) -> JsonObject:
    """Return a model's versions and tensors; with batching the first dim of each shape is -1."""
    batched = config.max_batch_size > 0
    return {
        "name": config.name,
        "versions": [str(version) for version in versions],
        "platform": config.message.platform or config.backend,
        "inputs": [_tensor(spec, batched) for spec in config.inputs],
        "outputs": [_tensor(spec, batched) for spec in config.outputs],
    }


def repository_index(rows: Iterable[Any]) -> list[dict[str, str]]:
    """Return the repository index; ``rows`` have name, version, state and reason."""
    index = []
    for row in rows:
        version = str(row.version) if row.version else ""
        entry = {"name": row.name, "version": version, "state": row.state, "reason": row.reason}
        index.append({name: value for name, value in entry.items() if value or name == "name"})
    return index


def model_statistics(models: Iterable[ModelStatistics]) -> JsonObject:
    """Return the statistics of models in the form of the statistics extension."""
    return {"model_stats": [_statistics(model) for model in models]}


def _statistics(model: ModelStatistics) -> JsonObject:
    done = model.success_count
    executed = model.executed_count
    return {
        "name": model.model,
        "version": str(model.version),
        "last_inference": model.last_inference_ms,
        "inference_count": model.inferences,
        "execution_count": model.executions,
        "inference_stats": {
            "success": _duration(done, model.success_ns),
            "fail": _duration(model.fail_count, model.fail_ns),
            "queue": _duration(done, model.queue_ns),
            "compute_input": _duration(executed, model.input_ns),
            "compute_infer": _duration(executed, model.infer_ns),
            "compute_output": _duration(executed, model.output_ns),
            "cache_hit": _duration(model.cache_hits, model.cache_hit_ns),
            "cache_miss": _duration(model.cache_misses, model.cache_miss_ns),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(batch.executions, batch.input_ns),
                "compute_infer": _duration(batch.executions, batch.infer_ns),
                "compute_output": _duration(batch.executions, batch.output_ns),
            }
            for size, batch in sorted(model.batches.items())
        ],
        "memory_usage": [],
    }


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}


def ready_models_only(body: bytes) -> bool:
    """Parse the body of an index request; return whether only ready models are requested.

    Raises BridgeError: INVALID_ARG, with Triton's text, for a malformed body.
    """
    document = parse_json(body) if body else {}
    if type(document) is not dict or "ready" not in document:
        return False
    if type(document["ready"]) is not bool:
        raise wrong_type(document["ready"], "boolean", where=" as 'ready'")
    return document["ready"]


def _tensor(spec: TensorSpec, batched: bool) -> JsonObject:
    shape = [-1, *spec.dims] if batched else list(spec.dims)
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}
