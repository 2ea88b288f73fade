"""Reading fields of a request's JSON, with Triton's words for what is wrong with them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from gpubridge.errors import BridgeError, ErrorCode, invalid, unsupported
from gpubridge.transport.context import LONG_TEXT

LONGEST_ID = 1 << 20
"""Bytes of a request's id: each record and answer has it. The compiled module knows, too."""
_LONGEST_CHARACTER = 4
_SEQUENCE_TEXT_BYTES = 128
"""A string correlation id may be as long as this; longer ones have no room at Triton."""

JsonObject = dict[str, Any]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Halves of surrogate pairs, by themselves or not."""
NO_TEXTS: Mapping[str, bytes] = {}


def internal(message: str) -> BridgeError:
    """Make an error of the kind that Triton's JSON reader reports (HTTP 500)."""
    return BridgeError(message, ErrorCode.INTERNAL)


def parse_json(body: bytes) -> Any:
    """Parse a request's JSON as Triton takes it.

    ``NaN`` and ``Infinity`` are numbers, and a NUL byte ends the document, whatever comes after it.
    """
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document, nul, _ = body.partition(b"\0")
        if nul and document:
            return parse_json(document)
        if b"NaN" in body or b"Infinity" in body:
            try:
                # Functions in Python, between whose calls other threads run.
                document = json.loads(body, parse_int=_integer, parse_float=_float)
                if _SURROGATE.search(body):
                    # Lone ones are no text: orjson refuses them, json does not.
                    json.dumps(document, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                pass
            else:
                return document
        raise internal(
            f"failed to parse the request JSON buffer: {error.msg} at {error.pos}"
        ) from error


def _float(digits: str) -> float:
    return float(digits)


def _integer(digits: str) -> int | float:
    """Read an integer as orjson does: beyond 64 bits it is a float."""
    if len(digits) <= len("-9223372036854775808"):
        number = int(digits)
        if -1 << 63 <= number < 1 << 64:
            return number
    return float(digits)


def _member(owner: JsonObject, name: str) -> Any:
    try:
        return owner[name]
    except (KeyError, TypeError, IndexError):
        raise internal(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        ) from None


def string(owner: JsonObject, name: str) -> str:
    """Return a member that must be a string."""
    value = _member(owner, name)
    if type(value) is not str:
        raise internal(f"Unable to parse '{name}': attempt to access JSON non-string as string")
    return value


def array(owner: JsonObject, name: str) -> list[Any]:
    """Return a member that must be an array."""
    value = _member(owner, name)
    if type(value) is not list:
        raise internal(f"Unable to parse '{name}': attempt to access JSON non-array as array")
    return value


def unsigned(value: Any, name: str) -> int:
    """Return a value that must be a number of 0 or more."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise internal(
            f"Unable to parse '{name}': attempt to access JSON non-unsigned-integer as "
            "unsigned-integer"
        )
    return value


def boolean(value: Any, name: str) -> bool:
    """Return a value that must be true or false."""
    if type(value) is not bool:
        raise internal(f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean")
    return value


def json_parameters(
    parameters: JsonObject, texts: Mapping[str, bytes] = NO_TEXTS
) -> str | memoryview:
    """Return the parameters of a request as the JSON that models are given; long ones as UTF-8.

    ``texts``: those that are JSON already.
    """
    if texts:
        pieces = [b"{"]
        if parameters:
            short = json_parameters(parameters)
            pieces += (
                (bytes(short, "utf-8") if isinstance(short, str) else bytes(short))[1:-1],
                b",",
            )
        for name, text in texts.items():
            pieces += orjson.dumps(name), b":", text, b","
        pieces[-1] = b"}"
        return memoryview(b"".join(pieces))
    if all(math.isfinite(value) for value in parameters.values() if isinstance(value, float)):
        raw = orjson.dumps(parameters)
        return raw.decode() if len(raw) <= LONG_TEXT else memoryview(raw)
    # orjson makes null of infinities, which JSON does not know but models are given.
    return json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))


def long_id(nbytes: int) -> BridgeError:
    """Make the error of an id that is too long."""
    return invalid(f"expected a request id of at most {LONGEST_ID} bytes, got one of {nbytes}")


def checked_id(identifier: str) -> str:
    """Return a request's id, if it is not too long; raises BridgeError."""
    if len(identifier) > LONGEST_ID // _LONGEST_CHARACTER:
        nbytes = len(identifier.encode(errors="replace"))
        if nbytes > LONGEST_ID:
            raise long_id(nbytes)
    return identifier


def text_of_sequence(value: str) -> str:
    """Return a correlation id that is a string, if it is not too long; raises BridgeError."""
    if len(value.encode(errors="replace")) > _SEQUENCE_TEXT_BYTES:
        raise unsupported(
            f"string correlation ID cannot be longer than {_SEQUENCE_TEXT_BYTES} characters"
        )
    return value
