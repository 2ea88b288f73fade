"""Bodies of the requests that load and unload models, and of those that change settings."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError, invalid, unavailable, unsupported
from gpubridge.protocol.fields import JsonObject, internal, parse_json
from gpubridge.protocol.long_strings import LongStrings
from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings
from gpubridge.telemetry.settings import (
    TraceSettings,
    parse_count,
    parse_levels,
    parse_unsigned,
)

_TRACE_MODE = "triton"
SEVERITIES = ("info", "warning", "error")
_UINT32 = (1 << 32) - 1
_PIECE = 1 << 20


class LoadParameters(NamedTuple):
    """Configuration and files that replace those of the repository when a model is loaded.

    ``files``: contents by ``file:<version>/<path>``.
    """

    config: str | None
    files: Mapping[str, bytes | memoryview]


def read_load(body: bytes) -> LoadParameters:
    """Read the body of a request to load a model; an empty one asks for nothing special.

    Raises BridgeError: INTERNAL, in Triton's words, for what cannot be read; INVALID_ARG for a file
    that is not in base64.
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
    # The whole document decides what is wrong first.
    return _read_load(LongStrings(body, split=False))


def _read_load(long: LongStrings) -> LoadParameters:
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in _load_parameters(long.document).items():
        if name != "config" and not name.startswith("file:"):
            raise internal(
                f"unexpected error on creating Triton parameter: unrecognized load parameter '{name}', "
                "expected config or file:<version>/<path>"
            )
        if type(value) is not str:
            raise internal("attempt to access JSON non-string as string")
        text = long.text(value)
        if name != "config":
            files[name] = _decoded(name, value if text is None else text)
        else:
            config = value if text is None else parse_json(b'"%b"' % bytes(text))
    return LoadParameters(config, files)


def _decoded(name: str, text: str | memoryview) -> bytes:
    pieces = []
    try:
        # In pieces, between which others get to run.
        for at in range(0, len(text), _PIECE):
            piece = base64.b64decode(text[at : at + _PIECE], validate=True)
            if len(piece) < _PIECE // 4 * 3 and at + _PIECE < len(text):
                raise ValueError("Excess data after padding")
            pieces.append(piece)
    except (binascii.Error, ValueError) as error:
        raise invalid(
            f"expected the content of '{name}' in base64, got what is none: {error}"
        ) from error
    return b"".join(pieces)


def read_unload(body: bytes) -> bool:
    """Read the body of a request to unload a model: whether its dependents go, too.

    Raises BridgeError: INTERNAL, in Triton's words, for what cannot be read.
    """
    value = _load_parameters(body).get("unload_dependents", False)
    if type(value) is not bool:
        raise internal("attempt to access JSON non-boolean as boolean")
    return value


def _load_parameters(body: bytes) -> dict[str, Any]:
    document = parse_json(body) if body else {}
    if type(document) is not dict:
        return {}
    parameters = document.get("parameters", {})
    if type(parameters) is not dict:
        raise internal("attempt to get members for non-object")
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
    """Read a change of log settings: fields of `LogSettings`; raises BridgeError.

    Members that Triton does not know mean nothing, and so do null ones.
    """
    given = _members(body)
    if "log_file" in given:
        raise fixed_location("log")
    changes: dict[str, Any] = {}
    for severity in SEVERITIES:
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
            raise unavailable(f"invalid argument for --log_format, got: {form}")
        changes["format"] = form
    return changes


def trace_document(settings: TraceSettings) -> JsonObject:
    """Return trace settings, in Triton's order; all numbers are strings there."""
    return {
        "trace_level": settings.level or ("OFF",),
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
        "log_frequency": str(settings.log_frequency),
        "trace_file": settings.file,
        "trace_mode": _TRACE_MODE,
    }


def trace_changes(body: bytes) -> dict[str, Any]:
    """Read a change of trace settings: fields of `TraceSettings`; None for one to be cleared.

    Raises BridgeError: in Triton's words.
    """
    return read_trace_changes(_members(body), _text, _names)


def read_trace_changes(
    given: Mapping[str, Any],
    text: Callable[[str, Any], str],
    names: Callable[[Any], Sequence[str]],
) -> dict[str, Any]:
    """Return the changes that settings by their names mean; those of None are to be cleared.

    ``text`` returns the text of the setting of a name and value, ``names`` the names of a value.

    Raises BridgeError: in Triton's words.
    """
    if "trace_file" in given:
        raise fixed_location("trace")
    mode = given.get("trace_mode")
    if mode not in (None, _TRACE_MODE):
        raise unsupported(
            f"trace_mode: expected '{_TRACE_MODE}', the only mode that is served, got '{mode}'"
        )
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "trace_level": ("level", lambda value: parse_levels(names(value))),
        "trace_rate": ("rate", lambda v: parse_unsigned("trace_rate", text("trace_rate", v))),
        "log_frequency": (
            "log_frequency",
            lambda v: parse_unsigned("log_frequency", text("log_frequency", v)),
        ),
        "trace_count": ("count", lambda value: parse_count(text("trace_count", value))),
    }
    return {
        field: None if given[name] is None else read(given[name])
        for name, (field, read) in readers.items()
        if name in given
    }


def fixed_location(kind: str) -> BridgeError:
    """Make the error of a change of the file that logs or traces go to."""
    return unsupported(f"{kind} file location can not be updated through network protocol")


def _members(body: bytes) -> JsonObject:
    """Return the members of a JSON object; as Triton, none of any other JSON."""
    document = parse_json(body)
    return document if type(document) is dict else {}


def _names(value: Any) -> Sequence[str]:
    if type(value) is not list:
        raise internal("attempt to access JSON non-array as array")
    if any(type(name) is not str for name in value):
        raise internal("attempt to access JSON non-string as string")
    return value


def _text(_: str, value: Any) -> str:
    if type(value) is not str:
        raise internal("attempt to access JSON non-string as string")
    return value
