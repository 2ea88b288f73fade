"""Messages that load and unload models: the model repository extension over gRPC."""

from __future__ import annotations

from typing import NamedTuple

from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import invalid, unsupported
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.protocol.repository_control import LoadParameters


class LoadRequest(NamedTuple):
    """Which model to load, and with what."""

    name: str
    parameters: LoadParameters


class UnloadRequest(NamedTuple):
    """Which model to unload, and whether its dependents go, too."""

    name: str
    dependents: bool


def read_load(data: bytes) -> LoadRequest:
    """Read a RepositoryModelLoadRequest.

    Raises BridgeError: INVALID_ARG for a parameter that is wrong, UNSUPPORTED where it names a
    repository, both in Triton's words; INTERNAL for other bytes.
    """
    message = _message("RepositoryModelLoadRequest", data)
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in message.parameters.items():
        if name == "config":
            config = _value(value, f"load parameter '{name}'", "string_param")
        elif name.startswith("file:"):
            files[name] = _value(value, f"load parameter '{name}'", "bytes_param")
        else:
            raise invalid(f"unrecognized load parameter '{name}'.")
    return LoadRequest(message.model_name, LoadParameters(config, files))


def read_unload(data: bytes) -> UnloadRequest:
    """Read a RepositoryModelUnloadRequest.

    Raises BridgeError as :func:`read_load`.
    """
    message = _message("RepositoryModelUnloadRequest", data)
    dependents = False
    if "unload_dependents" in message.parameters:
        value = message.parameters["unload_dependents"]
        dependents = _value(value, "'unload_dependents' parameter", "bool_param")
    return UnloadRequest(message.model_name, dependents)


def _message(name: str, data: bytes) -> ProtoMessage:
    message = parse_message(name, data)
    if message.repository_name:
        raise unsupported("'repository_name' specification is not supported")
    return message


def _value(parameter: ProtoMessage, what: str, expected: str) -> ProtoMessage:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid(f"invalid value type for {what}, expected {expected}.")
    return getattr(parameter, expected)
