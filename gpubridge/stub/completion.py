"""Asks a model class to complete its configuration, as Triton does before there is an instance."""

from __future__ import annotations

import json
from typing import Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils.model_config import ModelConfig

__all__ = ["completed_config"]


def completed_config(kind: Any, name: str, config: str) -> str | None:
    """Return the configuration that a model makes of ``config``, both as JSON.

    Parameters
    ----------
    kind : type
        Its ``TritonPythonModel``.

    Returns
    -------
    str or None
        None when it has no ``auto_complete_config``.

    Raises
    ------
    BridgeError
        When that returns something else than a ModelConfig.
    Exception
        Whatever it raises.
    """
    if not hasattr(kind, "auto_complete_config"):
        return None
    completed = kind.auto_complete_config(ModelConfig(config))
    if not isinstance(completed, ModelConfig):
        raise BridgeError(
            f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig "
            "object."
        )
    return json.dumps(completed.as_dict())
