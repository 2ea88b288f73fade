"""A model's configuration as a client gives it when it loads the model, instead of config.pbtxt."""

from __future__ import annotations

from google.protobuf import json_format  # type: ignore[import-untyped]

from gpubridge.config.schema import ProtoMessage, model_config_schema
from gpubridge.config.validate import refuse

__all__ = ["parse_config_override"]


def parse_config_override(text: str) -> ProtoMessage:
    """Return the ``inference.ModelConfig`` that `text` spells in JSON.

    It is the JSON of ``GET /v2/models/{name}/config``. Nothing is filled in or checked beyond the
    syntax and the schema.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: what is wrong with it.
    """
    message = model_config_schema().ModelConfig()
    if text.lstrip()[:1] != "{":
        # An empty array, or a null, would pass for an empty configuration.
        raise refuse(f"Invalid config override: expected a JSON object, got {text[:20]!r}")
    try:
        json_format.Parse(text, message)
    except (json_format.ParseError, RecursionError) as error:
        raise refuse(f"Invalid config override: {error}") from error
    return message
