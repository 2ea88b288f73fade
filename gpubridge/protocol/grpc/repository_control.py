"""Messages that load and unload models: the model repository extension over gRPC."""

from __future__ import annotations

from typing import Any

from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import invalid
from gpubridge.protocol.grpc.metadata import refuse_repository_name
from gpubridge.protocol.repository_control import LoadParameters


def read_load(message: ProtoMessage) -> LoadParameters:
    """Read a RepositoryModelLoadRequest.

    Raises BridgeError: INVALID_ARG for a parameter that is wrong, UNSUPPORTED where it names a
    repository, both in Triton's words.
    """
    refuse_repository_name(message)
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in message.parameters.items():
        if name == "config":
            config = _value(value, f"load parameter '{name}'", "string_param")
        elif name.startswith("file:"):
            files[name] = _value(value, f"load parameter '{name}'", "bytes_param")
        else:
            raise invalid(f"unrecognized load parameter '{name}'.")
    return LoadParameters(config, files)


def read_unload(message: ProtoMessage) -> bool:
    """Read a RepositoryModelUnloadRequest: whether its dependents go, too; raises as `read_load`."""
    refuse_repository_name(message)
    if "unload_dependents" not in message.parameters:
        return False
    value = message.parameters["unload_dependents"]
    dependents: bool = _value(value, "'unload_dependents' parameter", "bool_param")
    return dependents


def _value(parameter: ProtoMessage, what: str, expected: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid(f"invalid value type for {what}, expected {expected}.")
    return getattr(parameter, expected)
