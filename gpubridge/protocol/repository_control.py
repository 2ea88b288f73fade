"""Bodies of the requests that load and unload models: the model repository extension over HTTP."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpubridge.errors import invalid
from gpubridge.protocol.fields import internal, parse_json


class LoadParameters(NamedTuple):
    """What a model is loaded with instead of what the repository has.

    ``files``: contents by ``file:<version>/<path>``.
    """

    config: str | None
    files: Mapping[str, bytes]


def read_load(body: bytes) -> LoadParameters:
    """Read the body of a request to load a model; an empty one asks for nothing special.

    Raises BridgeError: INTERNAL, in Triton's words, for what cannot be read; INVALID_ARG for a file
    that is not in base64.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in _parameters(body).items():
        if name != "config" and not name.startswith("file:"):
            raise internal(
                f"unexpected error on creating Triton parameter: unrecognized load parameter '{name}', "
                "expected config or file:<version>/<path>"
            )
        if type(value) is not str:
            raise internal("attempt to access JSON non-string as string")
        if name == "config":
            config = value
        else:
            try:
                files[name] = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError) as error:
                raise invalid(
                    f"expected the content of '{name}' in base64, got what is none: {error}"
                ) from error
    return LoadParameters(config, files)


def read_unload(body: bytes) -> bool:
    """Read the body of a request to unload a model: whether its dependents go, too.

    Raises BridgeError: INTERNAL, in Triton's words, for what cannot be read.
    """
    value = _parameters(body).get("unload_dependents", False)
    if type(value) is not bool:
        raise internal("attempt to access JSON non-boolean as boolean")
    return value


def _parameters(body: bytes) -> dict[str, Any]:
    document = parse_json(body) if body else {}
    if type(document) is not dict:
        return {}
    parameters = document.get("parameters", {})
    if type(parameters) is not dict:
        raise internal("attempt to get members for non-object")
    return parameters
