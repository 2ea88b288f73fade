"""LogSettings and TraceSetting: settings as protobuf maps, and changes to them."""

from __future__ import annotations

from typing import Any

from gpubridge.config.schema import ProtoMessage
from gpubridge.protocol.fields import invalid
from gpubridge.protocol.grpc.messages import message_class, parse_message
from gpubridge.protocol.settings import TRACE_MODE, fixed_location, refuse_mode
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import (
    TraceSettings,
    parse_count,
    parse_levels,
    parse_unsigned,
)

__all__ = ["log_answer", "log_changes", "trace_answer", "trace_changes"]

_SEVERITIES = ("info", "warning", "error")


def log_answer(settings: LogSettings) -> bytes:
    """Return a LogSettingsResponse."""
    answer = message_class("LogSettingsResponse")()
    answer.settings["log_file"].string_param = settings.file
    for severity in _SEVERITIES:
        answer.settings[f"log_{severity}"].bool_param = getattr(settings, severity)
    answer.settings["log_verbose_level"].uint32_param = settings.verbose_level
    answer.settings["log_format"].string_param = settings.format
    encoded: bytes = answer.SerializeToString(deterministic=True)
    return encoded


def log_changes(data: bytes) -> dict[str, Any]:
    """Read a LogSettingsRequest: fields of `LogSettings`.

    Raises
    ------
    BridgeError
        In Triton's words.
    """
    given = parse_message("LogSettingsRequest", data).settings
    if "log_file" in given:
        raise fixed_location("log")
    changes: dict[str, Any] = {}
    for severity in _SEVERITIES:
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


def trace_answer(settings: TraceSettings) -> bytes:
    """Return a TraceSettingResponse."""
    answer = message_class("TraceSettingResponse")()
    for name, values in (
        ("trace_level", settings.level or ("OFF",)),
        ("trace_rate", (str(settings.rate),)),
        ("trace_count", (str(settings.count),)),
        ("log_frequency", (str(settings.log_frequency),)),
        ("trace_file", (settings.file,)),
        ("trace_mode", (TRACE_MODE,)),
    ):
        answer.settings[name].value.extend(values)
    encoded: bytes = answer.SerializeToString(deterministic=True)
    return encoded


def trace_changes(data: bytes) -> tuple[str, dict[str, Any]]:
    """Read a TraceSettingRequest: the model, and fields of `TraceSettings`; None clears one.

    Raises
    ------
    BridgeError
        In Triton's words.
    """
    message = parse_message("TraceSettingRequest", data)
    given = message.settings
    if "trace_file" in given:
        raise fixed_location("trace")
    if "trace_mode" in given and list(given["trace_mode"].value) not in ([], [TRACE_MODE]):
        raise refuse_mode(", ".join(given["trace_mode"].value))
    changes: dict[str, Any] = {}
    if "trace_level" in given:
        names = list(given["trace_level"].value)
        changes["level"] = parse_levels(names) if names else None
    for member, field in (("trace_rate", "rate"), ("log_frequency", "log_frequency")):
        if member in given:
            text = _only(given, member)
            changes[field] = None if text is None else parse_unsigned(member, text)
    if "trace_count" in given:
        text = _only(given, "trace_count")
        changes["count"] = None if text is None else parse_count(text)
    return message.model_name, changes


def _value(given: ProtoMessage, name: str, field: str, kind: str) -> Any:
    value = given[name]
    if value.WhichOneof("parameter_choice") != field:
        raise invalid(f"expect {kind} for '{name}'")
    return getattr(value, field)


def _only(given: ProtoMessage, name: str) -> str | None:
    values = given[name].value
    if not values:
        return None
    if len(values) > 1:
        raise invalid(f"expect only 1 value for '{name}'")
    text: str = values[0]
    return text
