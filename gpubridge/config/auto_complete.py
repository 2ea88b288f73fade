"""What a model's ``auto_complete_config`` returns, taken into the configuration that it completes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import json_format  # type: ignore[import-untyped]

from gpubridge.config.backends import Backends
from gpubridge.config.load import complete_model_config
from gpubridge.config.model_config import ModelConfig
from gpubridge.config.schema import ProtoMessage, model_config_schema
from gpubridge.config.validate import refuse

__all__ = ["finish_model_config"]

_SHIPPED_BACKENDS = Backends()
_LONGEST = 4 * 1024 * 1024
"""Characters that a model's configuration may have: reading it must not hold up the server."""

_TENSORS = ("input", "output")
_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def finish_model_config(
    draft: ModelConfig,
    returned: str | None,
    model_dir: Path,
    *,
    gpu_count: int | Callable[[], int],
    backends: Backends = _SHIPPED_BACKENDS,
) -> ModelConfig:
    """Return the whole configuration of a model that was asked to complete a draft.

    As in Triton, the batch size, the inputs and outputs, the transaction policy, and a scheduler where
    the draft chooses none are the model's; everything else stays as the draft has it.

    Parameters
    ----------
    draft : ModelConfig
        Not changed.
    returned : str or None
        What the model made of it, as JSON; None if it completes nothing.
    model_dir, gpu_count, backends
        As for `load_model_config`.

    Raises
    ------
    BridgeError
        INVALID_ARG when the model returned no configuration, or the whole is none that can be.
    """
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if returned is not None:
        _take(_parse(returned, draft.name), message)
    whole = complete_model_config(message, model_dir, gpu_count=gpu_count, backends=backends)
    # What was filled in before would pass for what somebody has asked for.
    return replace(whole, notices=draft.notices, fallbacks=draft.fallbacks)


def _parse(text: str, name: str) -> ProtoMessage:
    told = f"auto_complete_config of model '{name}' returned"
    if len(text) > _LONGEST:
        raise refuse(
            f"{told} a configuration of {len(text)} characters; expected at most {_LONGEST}"
        )
    try:
        # Not the standard library's: it takes halves of surrogate pairs, which are no text.
        values: Any = orjson.loads(text)
        if not isinstance(values, dict):
            raise refuse(f"{told} {text[:40]!r}; expected a ModelConfig that holds a dict")
        for direction in _TENSORS:
            _spell_dims(values.get(direction))
        message = model_config_schema().ModelConfig()
        json_format.ParseDict(values, message)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise refuse(f"{told} no valid configuration: {error}") from error
    return message


def _spell_dims(tensors: Any) -> None:
    """Let a single dimension stand without its list, as Triton does."""
    if isinstance(tensors, list):
        for tensor in tensors:
            if isinstance(tensor, dict) and isinstance(tensor.get("dims"), int):
                tensor["dims"] = [tensor["dims"]]


def _take(model: ProtoMessage, message: ProtoMessage) -> None:
    message.max_batch_size = model.max_batch_size
    for name in _TENSORS:
        message.ClearField(name)
        getattr(message, name).extend(getattr(model, name))
    if message.WhichOneof("scheduling_choice") is None:
        for name in _SCHEDULERS:
            if model.HasField(name):
                getattr(message, name).CopyFrom(getattr(model, name))
    if model.HasField("model_transaction_policy"):
        message.model_transaction_policy.CopyFrom(model.model_transaction_policy)
