"""Public interface for model authors; also named ``triton_python_backend_utils``.

Works inside a server and outside: a model can be unit-tested by building requests with the public
constructors and calling its ``execute``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils.batch import Batch
from gpubridge.pb_utils.c_module import TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU
from gpubridge.pb_utils.datatypes import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from gpubridge.pb_utils.exceptions import TritonError, TritonModelException
from gpubridge.pb_utils.framework_arena import device_arena
from gpubridge.pb_utils.logger import Logger
from gpubridge.pb_utils.metrics import MetricFamily
from gpubridge.pb_utils.models import (
    ModelConfig,
    get_input_config_by_name,
    get_model_dir,
    get_output_config_by_name,
    is_model_ready,
    load_model,
    unload_model,
    using_decoupled_model_transaction_policy,
)
from gpubridge.pb_utils.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    PreferredMemory,
    get_input_tensor_by_name,
)
from gpubridge.pb_utils.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    get_output_tensor_by_name,
)
from gpubridge.pb_utils.tensor import Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "Batch",
    "InferenceRequest",
    "InferenceResponse",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "device_arena",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Raise AttributeError that suggests the real spelling of a misspelt name."""
        import difflib  # noqa: PLC0415  (only for an error)

        word = name.strip("_").lower()
        inside = sorted((each for each in __all__ if word and word in each.lower()), key=len)
        likely = inside or difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {likely[0]}?" if likely else ""
        raise AttributeError(
            f"module 'triton_python_backend_utils' has no attribute '{name}'{hint}"
        )
