"""JSON bodies of control requests: loading and unloading of models, changes of settings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError, invalid, unavailable, unsupported
from gpubridge.protocol.fields import JsonObject, parse_json, shown, wrong_type
from gpubridge.protocol.long_strings import LongStrings
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import (
    TraceSettings,
    parse_count,
    parse_levels,
    parse_unsigned,
)

SEVERITIES = ("info", "warning", "error")
_UINT32 = (1 << 32) - 1
_PIECE = 1 << 20
_BLANKS = b" \t\n\v\f\r"
_PADDING = b"="
_ESCAPE = b"\\"


class LoadParameters(NamedTuple):
    """Configuration and files of a load request, which override those of the repository.

    ``files``: contents by ``file:<version>/<path>``.
    """

    config: str | None
    files: Mapping[str, bytes | memoryview]


def read_load(body: bytes) -> LoadParameters:
    """Parse the body of a load request, which may be empty.

    Raises BridgeError: INVALID_ARG for a malformed body, or a file that is not in base64.
    """
    long = LongStrings(body)
    try:
        load = _read_load(long)
    except BridgeError:
        if not long:
            raise
    else:
        if long.used:
            return load
    # Parsed as a whole, so that the first error in the document is reported.
    return _read_load(LongStrings(body, split=False))


def _read_load(long: LongStrings) -> LoadParameters:
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in _load_parameters(long.document).items():
        if name != "config" and not name.startswith("file:"):
            raise invalid(
                f"unexpected error on creating Triton parameter: unrecognized load parameter '{name}', "
                "expected config or file:<version>/<path>"
            )
        if type(value) is not str:
            raise wrong_type(value, "string", where=f" as parameter '{name}'")
        raw = long.text(value)
        text: str | memoryview = value if raw is None else raw
        if raw is not None and (name == "config" or _ESCAPE in bytes(raw)):
            text = parse_json(b'"%b"' % bytes(raw))
        if name == "config":
            config = str(text)
            continue
        try:
            files[name] = decode_base64(text)
        except ValueError as error:
            raise invalid(f"expected the content of '{name}' in base64: {error}") from error
    return LoadParameters(config, files)


def decode_base64(text: str | memoryview) -> bytes:
    """Return the bytes of a text in base64, as programs write it: in lines, and with padding or without.

    Raises ValueError for other characters, and for a text that is cut short.
    """
    pieces = []
    rest = b""
    # In pieces, so that other threads run between them.
    for at in range(0, len(text), _PIECE):
        part = text[at : at + _PIECE]
        rest += (part.encode("ascii") if isinstance(part, str) else bytes(part)).translate(
            None, _BLANKS
        )
        if _PADDING not in rest:
            whole = len(rest) // 4 * 4
            pieces.append(base64.b64decode(rest[:whole], validate=True))
            rest = rest[whole:]
    end = rest.rstrip(_PADDING)
    pieces.append(base64.b64decode(end + _PADDING * (-len(end) % 4), validate=True))
    return b"".join(pieces)


def read_unload(body: bytes) -> bool:
    """Parse the body of an unload request; return whether its dependents are unloaded, too.

    Raises BridgeError: INVALID_ARG, with Triton's text, for a malformed body.
    """
    value = _load_parameters(body, optional=True).get("unload_dependents")
    if value is None:
        return False
    if type(value) is not bool:
        raise wrong_type(value, "boolean", where=" as parameter 'unload_dependents'")
    return value


def _load_parameters(body: bytes, *, optional: bool = False) -> dict[str, Any]:
    """Return the parameters of a request; ``optional``: null is none."""
    document = parse_json(body) if body else {}
    if type(document) is not dict:
        return {}
    parameters = document.get("parameters", {})
    if parameters is None and optional:
        return {}
    if type(parameters) is not dict:
        raise invalid(
            "attempt to get members for non-object: expected an object as 'parameters', got "
            f"{shown(parameters)}"
        )
    return parameters


def log_document(settings: LogSettings) -> JsonObject:
    """Return the log settings, in Triton's order."""
    return {
        "log_file": settings.file,
        "log_info": settings.info,
        "log_warning": settings.warning,
        "log_error": settings.error,
        "log_verbose_level": settings.verbose_level,
        "log_format": settings.format,
    }


def log_changes(body: bytes) -> dict[str, Any]:
    """Parse a change of log settings into fields of `LogSettings`; raises BridgeError.

    As in Triton, unknown and null members are ignored.
    """
    given = _members(body)
    if given.get("log_file") is not None:
        raise fixed_location("log")
    changes: dict[str, Any] = {}
    for severity in SEVERITIES:
        value = given.get(f"log_{severity}")
        if value is None:
            continue
        if type(value) is not bool:
            raise wrong_type(value, "boolean", where=f" as 'log_{severity}'")
        changes[severity] = value
    verbose = given.get("log_verbose_level")
    if verbose is not None:
        if type(verbose) is not int or verbose < 0:
            raise wrong_type(verbose, "unsigned-integer", where=" as 'log_verbose_level'")
        changes["verbose_level"] = verbose & _UINT32
    form = given.get("log_format")
    if form is not None:
        if type(form) is not str:
            raise wrong_type(form, "string", where=" as 'log_format'")
        if form not in LOG_FORMATS:
            raise unavailable(f"invalid argument for --log_format, got: {form}")
        changes["format"] = form
    return changes


def trace_document(settings: TraceSettings) -> JsonObject:
    """Return the trace settings in Triton's order, with numbers as strings."""
    common: JsonObject = {
        "trace_level": settings.level or ("OFF",),
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
    }
    if settings.mode == "triton":
        of_mode = {"log_frequency": str(settings.log_frequency), "trace_file": settings.file}
        return {**common, **of_mode, "trace_mode": settings.mode}
    export = asdict(settings.opentelemetry)
    del export["resource"]
    given = {name: str(value) for name, value in export.items() if value}
    return {**common, "trace_mode": settings.mode, **given}


def trace_changes(body: bytes) -> dict[str, Any]:
    """Parse a change of trace settings into fields of `TraceSettings`; None clears one.

    As in Triton, an empty list of levels changes nothing. Raises BridgeError: with Triton's text.
    """
    given = _members(body)
    if given.get("trace_level") == []:
        del given["trace_level"]
    return read_trace_changes(given, _text, _names)


def read_trace_changes(
    given: Mapping[str, Any],
    text: Callable[[str, Any], str],
    names: Callable[[Any], Sequence[str]],
) -> dict[str, Any]:
    """Return changes of `TraceSettings` for given settings; None clears one.

    ``text`` returns the string in a setting's value, ``names`` the list of strings.

    Raises BridgeError: with Triton's text.
    """
    if "trace_file" in given:
        raise fixed_location("trace")
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "trace_level": ("level", lambda value: parse_levels(names(value))),
        "trace_rate": ("rate", lambda v: parse_unsigned("trace_rate", text("trace_rate", v))),
        "log_frequency": (
            "log_frequency",
            lambda v: parse_unsigned("log_frequency", text("log_frequency", v)),
        ),
        "trace_count": ("count", lambda value: parse_count(text("trace_count", value))),
    }
    changes = {
        field: None if given[name] is None else read(given[name])
        for name, (field, read) in readers.items()
        if name in given
    }
    mode = given.get("trace_mode")
    return changes if mode is None else {**changes, "mode": text("trace_mode", mode)}


def fixed_location(kind: str) -> BridgeError:
    """Return the error for a change of the log or trace file."""
    return unsupported(f"{kind} file location can not be updated through network protocol")


def _members(body: bytes) -> JsonObject:
    """Return the members of a JSON object; as in Triton, none for other JSON."""
    document = parse_json(body)
    return document if type(document) is dict else {}


def _names(value: Any) -> Sequence[str]:
    if type(value) is not list:
        raise wrong_type(value, "array", where=" of levels as 'trace_level'")
    for name in value:
        if type(name) is not str:
            raise wrong_type(name, "string", where=" for each level of 'trace_level'")
    return value


def _text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(value, "string", where=f" as '{name}'")
    return value
