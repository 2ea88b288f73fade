"""Configuration: a model's ``config.pbtxt`` and versions, the server's settings."""

from gpubridge.config.backends import PYTHON_BACKEND, Backends
from gpubridge.config.connections import (
    CompressionLevel,
    GrpcConnections,
    HttpConnections,
    TlsSettings,
)
from gpubridge.config.load import (
    CONFIG_FILENAME,
    NotServable,
    complete_model_config,
    custom_config,
    finish_model_config,
    load_model_config,
    parse_model_config,
)
from gpubridge.config.model_config import (
    KSERVE_DATATYPES,
    InstanceGroup,
    ModelConfig,
    ModelSettings,
    TensorSpec,
    VersionPolicy,
    available_versions,
    select_versions,
    served_versions,
)
from gpubridge.config.openai import (
    EMBEDDING_OUTPUT,
    FIELDS_OUTPUT,
    REQUEST_INPUT,
    TEXT_INPUT,
    TEXT_OUTPUT,
    openai_endpoints,
)
from gpubridge.config.python_backend import PythonBackendSettings
from gpubridge.config.restrictions import Restrictions
from gpubridge.config.settings import ModelControlMode, ServerSettings
from gpubridge.config.validate import unsupported_features
