"""Contents of ``c_python_backend_utils``, Triton's embedded module."""

from __future__ import annotations

from gpubridge.pb_utils.calls import ResponseIterator
from gpubridge.pb_utils.exceptions import SharedMemory, TritonError, TritonModelException
from gpubridge.pb_utils.logger import Logger
from gpubridge.pb_utils.metrics import Metric, MetricFamily, MetricKind
from gpubridge.pb_utils.model_control import is_model_ready, load_model, unload_model
from gpubridge.pb_utils.output_form import MemoryType, PreferredMemory
from gpubridge.pb_utils.request import InferenceRequest
from gpubridge.pb_utils.request_fields import InferenceTrace
from gpubridge.pb_utils.response import InferenceResponse
from gpubridge.pb_utils.response_sender import InferenceResponseSender
from gpubridge.pb_utils.tensor import Tensor

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

TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
COUNTER = MetricKind.COUNTER
GAUGE = MetricKind.GAUGE
HISTOGRAM = MetricKind.HISTOGRAM
shared_memory = SharedMemory()
