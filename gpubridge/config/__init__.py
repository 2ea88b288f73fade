"""Configuration: a model's ``config.pbtxt`` and versions, the server's settings."""

from gpubridge.config.backends import PYTHON_BACKEND, Backends
from gpubridge.config.load import (
    CONFIG_FILENAME,
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
    TensorSpec,
    VersionPolicy,
    available_versions,
    select_versions,
    served_versions,
)
from gpubridge.config.model_settings import ModelSettings
from gpubridge.config.python_backend import PythonBackendSettings
from gpubridge.config.restrictions import Restrictions
from gpubridge.config.schema import model_config_schema
from gpubridge.config.settings import (
    CompressionLevel,
    GrpcConnections,
    HttpConnections,
    ModelControlMode,
    ServerSettings,
)
from gpubridge.config.tls import TlsSettings
from gpubridge.config.validate import unsupported_features

__all__ = [
    "CONFIG_FILENAME",
    "KSERVE_DATATYPES",
    "PYTHON_BACKEND",
    "Backends",
    "CompressionLevel",
    "GrpcConnections",
    "HttpConnections",
    "InstanceGroup",
    "ModelConfig",
    "ModelControlMode",
    "ModelSettings",
    "PythonBackendSettings",
    "Restrictions",
    "ServerSettings",
    "TensorSpec",
    "TlsSettings",
    "VersionPolicy",
    "available_versions",
    "complete_model_config",
    "custom_config",
    "finish_model_config",
    "load_model_config",
    "model_config_schema",
    "parse_model_config",
    "select_versions",
    "served_versions",
    "unsupported_features",
]
