"""LogSettings and TraceSetting: settings as protobuf maps, and changes to them."""

from __future__ import annotations

from typing import Any

from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import invalid
from gpubridge.protocol.fields import JsonObject
from gpubridge.protocol.settings import (
    SEVERITIES,
    fixed_location,
    log_document,
    read_trace_changes,
    trace_document,
)
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import TraceSettings

_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def log_answer(settings: LogSettings) -> JsonObject:
    """Return the fields of a LogSettingsResponse."""
    values = log_document(settings).items()
    return {"settings": {name: {_FIELDS[type(value)]: value} for name, value in values}}


def log_changes(message: ProtoMessage) -> dict[str, Any]:
    """Read a LogSettingsRequest: fields of `LogSettings`; raises BridgeError."""
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
    """Read a TraceSettingRequest: fields of `TraceSettings`; None clears one.

    Raises BridgeError: in Triton's words.
    """
    given: dict[str, Any] = {
        name: list(setting.value) or None for name, setting in message.settings.items()
    }
    if given.get("trace_mode"):
        given["trace_mode"] = ", ".join(given["trace_mode"])
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
