"""The messages that describe the server and its models, from the documents of the HTTP side."""

from __future__ import annotations

import re

from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import invalid, unsupported
from gpubridge.protocol.grpc.messages import parse_message

# Of a HealthCheckResponse of grpc.health.v1: field 1, an enum.
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVICE_UNKNOWN = b"\x08\x03"
_VERSION = re.compile(r"[ \t-\r]*([+-]?[0-9]+)", re.ASCII)
_LARGEST = (1 << 63) - 1


def model_version(text: str) -> int | None:
    """Return the version that a request spells; None for any.

    Raises BridgeError: INVALID_ARG in Triton's words, which reads as far as there are digits.
    """
    if not text:
        return None
    match = _VERSION.match(text)
    # A longer number is out of range whatever it is, and int() refuses very long ones.
    version = int(match[1][:40]) if match else _LARGEST + 1
    if not -_LARGEST - 1 <= version <= _LARGEST:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if version < 0:
        raise invalid(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


def refuse_repository_name(message: ProtoMessage) -> None:
    """Refuse a request that names a repository, in Triton's words."""
    if message.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def health_service(data: bytes) -> str:
    """Return the service that a HealthCheckRequest of grpc.health.v1 names; raises BridgeError."""
    # Its one field is like the first of this one, which we have a class for.
    service: str = parse_message("ModelReadyRequest", data).name
    return service


def health_answer(serving: bool | None) -> bytes:
    """Return a HealthCheckResponse of grpc.health.v1; None for an unknown service."""
    if serving is None:
        return _SERVICE_UNKNOWN
    return _SERVING if serving else _NOT_SERVING
