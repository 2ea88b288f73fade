"""The environment that a backend brings for its models."""

from __future__ import annotations

from gpubridge.config import ModelConfig
from gpubridge.engine.environment import PARAMETER

__all__ = ["environment_parameters"]

_ENVIRONMENTS = ("pb_exec_env_model.py.tar.gz", "venv")
"""Beside the backend's ``model.py``: Triton's name for a packed one, and ours for a directory."""


def environment_parameters(config: ModelConfig) -> dict[str, str]:
    """Return a model's parameters, with its backend's environment unless it names one itself."""
    parameters = config.parameters
    if config.backend_file is None or parameters.get(PARAMETER):
        return parameters
    for name in _ENVIRONMENTS:
        path = config.backend_file.parent / name
        if path.exists():
            return {**parameters, PARAMETER: str(path.absolute())}
    return parameters
