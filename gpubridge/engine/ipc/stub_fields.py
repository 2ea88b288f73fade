"""Fields of a stub's control messages, checked: a stub may send any JSON."""

from __future__ import annotations

from typing import Any

from gpubridge.telemetry.spans import Span
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import FALLBACKS, LONGEST_SPAN_TEXT, MOST_ATTRIBUTES


def number_field(fields: dict[str, Any], name: str) -> int:
    """Return a field that must be an integer of at least 0; raises MalformedMessage."""
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"field {name!r}: expected a number, got {value!r}")
    return value


def notice_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a NOTICE message; raises MalformedMessage."""
    for name in ("level", "line"):
        number_field(fields, name)
    for name in ("text", "file"):
        if not isinstance(fields.get(name), str):
            raise MalformedMessage(f"field {name!r}: expected a string, got {fields.get(name)!r}")
    once = fields.get("once", "")
    if not isinstance(once, str):
        raise MalformedMessage(f"field 'once': expected a string, got {once!r:.100}")
    fallback = fields.get("fallback")
    if fallback is not None and not (isinstance(fallback, str) and fallback in FALLBACKS):
        raise MalformedMessage(
            f"field 'fallback': expected one of {', '.join(FALLBACKS)}, got {fallback!r}"
        )
    return fields


def span_of(fields: dict[str, Any]) -> tuple[int, int, Span]:
    """Return a SPAN message's trace, enclosing span and span; raises MalformedMessage."""
    numbers = [number_field(fields, name) for name in ("trace", "parent", "id", "start", "end")]
    attributes = fields.get("attributes")
    if not isinstance(attributes, dict) or len(attributes) > MOST_ATTRIBUTES:
        raise MalformedMessage(f"field 'attributes': expected an object, got {attributes!r:.100}")
    texts = [fields.get("name"), fields.get("error"), *attributes]
    texts += [value for value in attributes.values() if not isinstance(value, (int, float))]
    whole = [value for value in attributes.values() if isinstance(value, int)]
    if max(numbers) >= 1 << 64 or max([*numbers[3:], *map(abs, whole)]) >= 1 << 63:
        raise MalformedMessage(f"a span with too large numbers: {[*numbers, *whole]!r:.200}")
    for text in texts:
        if not isinstance(text, str) or len(text) > LONGEST_SPAN_TEXT:
            raise MalformedMessage(f"a span with {text!r:.100}, expected a string")
    trace, parent, number, start, end = numbers
    valid = {_encodable(key): _encodable(value) for key, value in attributes.items()}
    name, error = map(_encodable, texts[:2])
    return trace, parent, Span(name, number, None, start, max(start, end), valid, error=error)


def _encodable(value: Any) -> Any:
    """Replace what UTF-8 has no bytes for, as lone surrogates."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def completed_text(fields: dict[str, Any]) -> str | None:
    """Return the configuration of a COMPLETED message; raises MalformedMessage."""
    text = fields.get("config")
    if text is not None and not isinstance(text, str):
        raise MalformedMessage(f"field 'config': expected a string or null, got {text!r:.100}")
    return text
