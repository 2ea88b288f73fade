"""The logging and trace extensions over HTTP: settings as JSON, and changes to them."""

from __future__ import annotations

from typing import Any

import orjson

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.fields import JsonObject, internal, parse_json
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import (
    TraceSettings,
    parse_count,
    parse_levels,
    parse_unsigned,
)

__all__ = [
    "TRACE_MODE",
    "fixed_location",
    "log_changes",
    "log_document",
    "refuse_mode",
    "trace_changes",
    "trace_document",
]

TRACE_MODE = "triton"
_SEVERITIES = ("info", "warning", "error")
_UINT32 = (1 << 32) - 1


def log_document(settings: LogSettings) -> bytes:
    """Return the log settings, in Triton's order."""
    return orjson.dumps(
        {
            "log_file": settings.file,
            "log_info": settings.info,
            "log_warning": settings.warning,
            "log_error": settings.error,
            "log_verbose_level": settings.verbose_level,
            "log_format": settings.format,
        }
    )


def log_changes(body: bytes) -> dict[str, Any]:
    """Read a change of log settings: fields of `LogSettings`.

    Members that Triton does not know mean nothing, and so do null ones.

    Raises
    ------
    BridgeError
        In Triton's words.
    """
    given = _members(body)
    if "log_file" in given:
        raise fixed_location("log")
    changes: dict[str, Any] = {}
    for severity in _SEVERITIES:
        value = given.get(f"log_{severity}")
        if value is None:
            continue
        if type(value) is not bool:
            raise internal("attempt to access JSON non-boolean as boolean")
        changes[severity] = value
    verbose = given.get("log_verbose_level")
    if verbose is not None:
        if type(verbose) is not int or verbose < 0:
            raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
        changes["verbose_level"] = verbose & _UINT32
    form = given.get("log_format")
    if form is not None:
        if type(form) is not str:
            raise internal("attempt to access JSON non-string as string")
        if form not in LOG_FORMATS:
            raise BridgeError(
                f"invalid argument for --log_format, got: {form}", ErrorCode.UNAVAILABLE
            )
        changes["format"] = form
    return changes


def trace_document(settings: TraceSettings) -> bytes:
    """Return trace settings, in Triton's order; all numbers are strings there."""
    return orjson.dumps(
        {
            "trace_level": settings.level or ("OFF",),
            "trace_rate": str(settings.rate),
            "trace_count": str(settings.count),
            "log_frequency": str(settings.log_frequency),
            "trace_file": settings.file,
            "trace_mode": TRACE_MODE,
        }
    )


def trace_changes(body: bytes) -> dict[str, Any]:
    """Read a change of trace settings: fields of `TraceSettings`; None for one to be cleared.

    Raises
    ------
    BridgeError
        In Triton's words.
    """
    given = _members(body)
    if "trace_file" in given:
        raise fixed_location("trace")
    if given.get("trace_mode") not in (None, TRACE_MODE):
        raise refuse_mode(given["trace_mode"])
    changes: dict[str, Any] = {}
    if "trace_level" in given:
        changes["level"] = _levels(given["trace_level"])
    for member, field in (("trace_rate", "rate"), ("log_frequency", "log_frequency")):
        if member in given:
            text = _text(given[member])
            changes[field] = None if text is None else parse_unsigned(member, text)
    if "trace_count" in given:
        text = _text(given["trace_count"])
        changes["count"] = None if text is None else parse_count(text)
    return changes


def fixed_location(kind: str) -> BridgeError:
    """Make the error of a change of the file that logs or traces go to."""
    return BridgeError(
        f"{kind} file location can not be updated through network protocol", ErrorCode.UNSUPPORTED
    )


def refuse_mode(mode: object) -> BridgeError:
    """Make the error of a mode of tracing that there is not."""
    return BridgeError(
        f"trace_mode: expected '{TRACE_MODE}', the only mode that is served, got '{mode}'",
        ErrorCode.UNSUPPORTED,
    )


def _members(body: bytes) -> JsonObject:
    """Return the members of a JSON object; as Triton, none of any other JSON."""
    document = parse_json(body)
    return document if type(document) is dict else {}


def _levels(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if type(value) is not list:
        raise internal("attempt to access JSON non-array as array")
    if any(type(name) is not str for name in value):
        raise internal("attempt to access JSON non-string as string")
    return parse_levels(value)


def _text(value: Any) -> str | None:
    if value is not None and type(value) is not str:
        raise internal("attempt to access JSON non-string as string")
    return value
