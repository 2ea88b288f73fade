"""Fields of a stub's rare messages, checked like any foreign input."""

from __future__ import annotations

from typing import Any

from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import FALLBACKS


def number(fields: dict[str, Any], name: str) -> int:
    """Return a field that must be a number of at least 0; raises MalformedMessage."""
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"field {name!r}: expected a number, got {value!r}")
    return value


def log_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a LOG message; raises MalformedMessage."""
    for name in ("level", "line"):
        number(fields, name)
    for name in ("text", "file"):
        if not isinstance(fields.get(name), str):
            raise MalformedMessage(f"field {name!r}: expected a string, got {fields.get(name)!r}")
    fallback = fields.get("fallback")
    if fallback is not None and fallback not in FALLBACKS:
        raise MalformedMessage(
            f"field 'fallback': expected one of {', '.join(FALLBACKS)}, got {fallback!r}"
        )
    return fields


def completed_text(fields: dict[str, Any]) -> str | None:
    """Return the configuration of a COMPLETED message; raises MalformedMessage."""
    text = fields.get("config")
    if text is not None and not isinstance(text, str):
        raise MalformedMessage(f"field 'config': expected a string or null, got {text!r:.100}")
    return text
