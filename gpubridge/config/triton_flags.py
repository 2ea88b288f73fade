"""Flags of tritonserver that are not served: without effect, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpubridge.flags import boolean, check_flags, flags_of, unserved

_Given = tuple[Any, ...]
_HTTP, _GRPC, _MEMORY, _MODELS = "HTTP", "gRPC", "Memory", "Model repository"
_CLOUDS, _CACHE, _RATES = "Cloud endpoints", "Response cache", "Rate limiter"
_LOOP = "one event loop serves all connections"
_NO_VERTEX = "Vertex AI's endpoint is not served"
_NO_SAGEMAKER = "SageMaker's endpoint is not served"
_ARENA = "tensors are in host memory that the server and one model share, and grow as needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Flags about the repository."""

    model_load_thread_count: _Given = unserved(_MODELS, "all models load beside each other", of=int)
    model_load_retry_count: _Given = unserved(
        _MODELS, "a model that fails to load is not retried", 0, of=int
    )
    model_namespacing: _Given = unserved(
        _MODELS, "a model's name is its name in all repositories", False, of=boolean, refused=True
    )
    repoagent_directory: _Given = unserved(_MODELS, "no repository agents are run")

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFlags:
    """Flags about threads and pools of the endpoints."""

    http_thread_count: _Given = unserved(_HTTP, _LOOP, of=int)
    grpc_infer_thread_count: _Given = unserved(_GRPC, _LOOP, of=int)
    grpc_infer_allocation_pool_size: _Given = unserved(
        _GRPC, "requests are not kept for reuse", of=int
    )
    grpc_max_response_pool_size: _Given = unserved(
        _GRPC, "responses are not kept for reuse", of=int
    )

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFlags:
    """Flags about endpoints of clouds."""

    allow_sagemaker: _Given = unserved(_CLOUDS, _NO_SAGEMAKER, False, of=boolean, refused=True)
    sagemaker_port: _Given = unserved(_CLOUDS, _NO_SAGEMAKER, of=int)
    sagemaker_safe_port_range: _Given = unserved(_CLOUDS, _NO_SAGEMAKER)
    sagemaker_thread_count: _Given = unserved(_CLOUDS, _NO_SAGEMAKER, of=int)
    allow_vertex_ai: _Given = unserved(_CLOUDS, _NO_VERTEX, False, of=boolean, refused=True)
    vertex_ai_port: _Given = unserved(_CLOUDS, _NO_VERTEX, of=int)
    vertex_ai_thread_count: _Given = unserved(_CLOUDS, _NO_VERTEX, of=int)
    vertex_ai_default_model: _Given = unserved(_CLOUDS, _NO_VERTEX)

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlags:
    """Flags about the cache of responses."""

    cache_directory: _Given = unserved(_CACHE, "the cache is a part of the server")

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFlags:
    """Flags about the limit of executions."""

    rate_limit: _Given = unserved(
        _RATES,
        "instances take requests as they become free; models with a rate_limiter are refused",
        "off",
        of=str.lower,
        choices=("off", "execution_count"),
    )
    rate_limit_resource: _Given = unserved(_RATES, "no resources are counted")

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def limited(self) -> bool:
        """Return whether Triton would limit executions by resources, which this server does not."""
        return self.rate_limit[-1:] == ("execution_count",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """Flags about memory and devices."""

    pinned_memory_pool_byte_size: _Given = unserved(_MEMORY, _ARENA, of=int)
    cuda_memory_pool_byte_size: _Given = unserved(
        _MEMORY,
        "device memory is --backend-config=python,device-arena-bytes of each process with a GPU",
    )
    cuda_virtual_address_size: _Given = unserved(_MEMORY, "states do not grow in device memory")
    min_supported_compute_capability: _Given = unserved(_MEMORY, "every GPU is used", of=float)
    buffer_manager_thread_count: _Given = unserved(
        _MEMORY, "tensors are not copied by threads", of=int
    )
    host_policy: _Given = unserved(_MEMORY, "processes are bound to no NUMA node and no CPUs")
    model_load_gpu_limit: _Given = unserved(_MEMORY, "how full a GPU is prevents no load")
    enable_peer_access: _Given = unserved(
        _MEMORY, "GPUs that reach each other do so", True, of=boolean
    )

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFlags:
    """All given values of each flag.

    Flags that tune a different implementation have no effect; flags that request a missing feature are
    refused.
    """

    models: ModelFlags = flags_of(ModelFlags)
    endpoints: EndpointFlags = flags_of(EndpointFlags)
    clouds: CloudFlags = flags_of(CloudFlags)
    cache: CacheFlags = flags_of(CacheFlags)
    rates: RateFlags = flags_of(RateFlags)
    memory: MemoryFlags = flags_of(MemoryFlags)
