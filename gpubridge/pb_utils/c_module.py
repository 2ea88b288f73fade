"""Contents of ``c_python_backend_utils``, Triton's embedded module."""

from __future__ import annotations

from typing import NoReturn

from gpubridge.pb_utils.exceptions import TritonError, TritonModelException
from gpubridge.pb_utils.logger import Logger
from gpubridge.pb_utils.metrics import Metric, MetricFamily, MetricKind
from gpubridge.pb_utils.models import is_model_ready, load_model, unload_model
from gpubridge.pb_utils.request import (
    InferenceRequest,
    MemoryType,
    PreferredMemory,
)
from gpubridge.pb_utils.response import (
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
)
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.pb_utils.trace import InferenceTrace

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "SharedMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "shared_memory",
    "unload_model",
]


class SharedMemory:
    """Triton's shared memory pool, which gpubridge does not have."""

    __module__ = "c_python_backend_utils"

    def free_memory(self) -> NoReturn:
        """Raise TritonModelException: there is no such pool."""
        raise TritonModelException(
            "shared_memory.free_memory() is not supported by this version of gpubridge yet; see "
            "the compatibility table in its documentation"
        )


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
COUNTER = MetricKind.COUNTER
GAUGE = MetricKind.GAUGE
HISTOGRAM = MetricKind.HISTOGRAM
shared_memory = SharedMemory()
