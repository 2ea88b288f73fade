"""Messages of the control methods: health, versions, loads, settings."""

from __future__ import annotations

import re
from typing import Any

from gpubridge.errors import invalid, unsupported
from gpubridge.protocol.control import (
    SEVERITIES,
    LoadParameters,
    fixed_location,
    log_document,
    read_trace_changes,
    trace_document,
)
from gpubridge.protocol.fields import JsonObject
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.schema import ProtoMessage
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import TraceSettings

# Of a HealthCheckResponse of grpc.health.v1: field 1, an enum.
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVICE_UNKNOWN = b"\x08\x03"
_VERSION = re.compile(r"[ \t-\r]*([+-]?[0-9]+)", re.ASCII)
_LARGEST = (1 << 63) - 1


def model_version(text: str) -> int | None:
    """Parse a version; None for an empty text; raises BridgeError: INVALID_ARG."""
    if not text:
        return None
    match = _VERSION.match(text)
    # Longer numbers are out of range anyway, and int() refuses very long ones.
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
    """Refuse a request that names a repository, with Triton's text."""
    if message.repository_name:
        raise unsupported("'repository_name' specification is not supported")


def health_service(data: bytes | memoryview) -> str:
    """Return the service named by a HealthCheckRequest of grpc.health.v1; raises BridgeError."""
    # Its only field has the same number and type as the first of this message.
    service: str = parse_message("ModelReadyRequest", data).name
    return service


def health_answer(serving: bool | None) -> bytes:
    """Return a HealthCheckResponse of grpc.health.v1; None for an unknown service."""
    if serving is None:
        return _SERVICE_UNKNOWN
    return _SERVING if serving else _NOT_SERVING


def read_load(message: ProtoMessage) -> LoadParameters:
    """Parse a RepositoryModelLoadRequest.

    Raises BridgeError: INVALID_ARG for a wrong parameter, UNSUPPORTED if it names a repository, both
    with Triton's text.
    """
    refuse_repository_name(message)
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in message.parameters.items():
        if name == "config":
            config = _given(value, f"load parameter '{name}'", "string_param")
        elif name.startswith("file:"):
            files[name] = _given(value, f"load parameter '{name}'", "bytes_param")
        else:
            raise invalid(f"unrecognized load parameter '{name}'.")
    return LoadParameters(config, files)


def read_unload(message: ProtoMessage) -> bool:
    """Return whether an unload request includes dependents; raises as `read_load`."""
    refuse_repository_name(message)
    if "unload_dependents" not in message.parameters:
        return False
    value = message.parameters["unload_dependents"]
    dependents: bool = _given(value, "'unload_dependents' parameter", "bool_param")
    return dependents


def _given(parameter: ProtoMessage, what: str, expected: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise invalid(f"invalid value type for {what}, expected {expected}.")
    return getattr(parameter, expected)


_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def log_answer(settings: LogSettings) -> JsonObject:
    """Return the fields of a LogSettingsResponse."""
    values = log_document(settings).items()
    return {"settings": {name: {_FIELDS[type(value)]: value} for name, value in values}}


def log_changes(message: ProtoMessage) -> dict[str, Any]:
    """Parse a LogSettingsRequest into fields of `LogSettings`; raises BridgeError."""
    given = message.settings
    if "log_file" in given:
        raise fixed_location("log")
    changes: dict[str, Any] = {}
    for severity in SEVERITIES:
        if f"log_{severity}" in given:
            changes[severity] = _value(given, f"log_{severity}", "bool_param", "boolean")
    if "log_verbose_level" in given:
        changes["verbose_level"] = _value(given, "log_verbose_level", "uint32_param", "int32")
    if "log_format" in given:
        form = _value(given, "log_format", "string_param", "string")
        if form not in LOG_FORMATS:
            raise invalid(f"invalid argument for log_format, got: {form}")
        changes["format"] = form
    return changes


def trace_answer(settings: TraceSettings) -> JsonObject:
    """Return the fields of a TraceSettingResponse."""
    values = trace_document(settings).items()
    return {
        "settings": {
            name: {"value": [value] if isinstance(value, str) else value} for name, value in values
        }
    }


def trace_changes(message: ProtoMessage) -> dict[str, Any]:
    """Parse a TraceSettingRequest into fields of `TraceSettings`; None clears one.

    Raises BridgeError: with Triton's text.
    """
    given = {name: list(setting.value) or None for name, setting in message.settings.items()}
    return read_trace_changes(given, _only, lambda names: names)


def _value(given: ProtoMessage, name: str, field: str, kind: str) -> Any:
    value = given[name]
    if value.WhichOneof("parameter_choice") != field:
        raise invalid(f"expect {kind} for '{name}'")
    return getattr(value, field)


def _only(name: str, values: list[str]) -> str:
    if len(values) > 1:
        raise invalid(f"expect only 1 value for '{name}'")
    return values[0]
