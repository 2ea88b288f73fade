"""Fields of requests, checked with Triton's error texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gpubridge.dataplane import count_json_parts
from gpubridge.errors import BridgeError, ErrorCode, invalid, listed, unsupported
from gpubridge.transport.context import LONG_TEXT

LONGEST_ID = 1 << 20
"""Maximum bytes of a request's id; the compiled module has the same limit."""
_LONGEST_CHARACTER = 4
_SEQUENCE_TEXT_BYTES = 128
"""Maximum bytes of a string correlation id, as in Triton."""

JsonObject = dict[str, Any]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Surrogates, single or in pairs."""
MALFORMED = "Unable to parse request"
"""Triton's error for a malformed gRPC message."""
NO_TEXTS: Mapping[str, bytes] = {}


def wrong_type(value: Any, kind: str, before: str = "", where: str = "") -> BridgeError:
    """Return the error for a JSON value of a wrong type: Triton's text, then what was expected, where.

    - ``kind``: a key of `_EXPECTED`.
    - ``before``: what precedes Triton's words.
    - ``where``: whose value it is.
    """
    words = f"attempt to access JSON non-{kind} as {'double' if kind == 'number' else kind}"
    return invalid(f"{before}{words}: expected {_EXPECTED[kind]}{where}, got {shown(value)}")


_EXPECTED = {
    "array": "an array",
    "boolean": "true or false",
    "number": "a number",
    "object": "an object",
    "signed-integer": "an integer of 64 bits",
    "string": "a string",
    "unsigned-integer": "an integer of 0 or more, of 64 bits",
}


def shown(value: Any) -> str:
    """Return a JSON value in few characters: the beginning of a text, the kind of a structure."""
    if type(value) in _STRUCTURES:
        return _STRUCTURES[type(value)]
    if type(value) is str:
        return json.dumps(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    return json.dumps(value) if type(value) in _SCALARS else "an array"


MOST_MEMBERS = 1 << 16
"""Members and objects that the JSON of a request may have."""
MOST_ARRAYS = 1 << 18
MOST_VALUES = 1 << 22
"""Arrays, and values in all of them, that may be parsed; those of the data of tensors seldom are."""
MOST_DIMS = 1 << 10
"""Dims that a shape may have, so that their product is a matter of a moment."""
_LEAST_MEMBER = 3
"""Bytes of the shortest member or object, with what divides it from the next."""
_SHOWN = 32
"""Characters of a client's text that an error repeats."""
_STRUCTURES: dict[type, str] = {dict: "an object", list: "an array"}
_SCALARS = (bool, int, float, type(None))


def check_parts(body: bytes | memoryview, most_values: int = MOST_VALUES) -> None:
    """Raise INVALID_ARG for a document with more parts than a parser takes in a moment.

    It makes an object of each, while no other thread runs.
    """
    if len(body) <= _LEAST_MEMBER * MOST_MEMBERS:
        return
    members, arrays, commas = count_json_parts(body)
    for count, most, what in (
        (members, MOST_MEMBERS, "members and objects"),
        (arrays, MOST_ARRAYS, "arrays"),
        (commas + 1, most_values, "values"),
    ):
        if count > most:
            raise invalid(
                f"expected at most {most} {what} in the JSON of a request, got {count}: send many values "
                "as the binary data of a tensor"
            )


def check_rank(shape: Sequence[object], name: str) -> None:
    """Raise INVALID_ARG for a shape of an input with more dims than any model has."""
    if len(shape) > MOST_DIMS:
        raise invalid(
            f"expected a shape of at most {MOST_DIMS} dims for input '{name}', got {len(shape)} dims"
        )


def parse_json(body: bytes) -> Any:
    """Parse a request's JSON as Triton does.

    ``NaN`` and ``Infinity`` are numbers, and a NUL byte ends the document.
    """
    check_parts(body)
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document, nul, _ = body.partition(b"\0")
        if nul and document:
            return parse_json(document)
        if b"NaN" in body or b"Infinity" in body:
            try:
                # Python callbacks, so that other threads run between their calls.
                document = json.loads(body, parse_int=_integer, parse_float=_float)
                if _SURROGATE.search(body):
                    # Lone surrogates are invalid: orjson refuses them, json does not.
                    json.dumps(document, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                pass
            else:
                return document
        beginning = shown(body[error.pos : error.pos + 4 * _SHOWN].decode(errors="replace"))
        raise invalid(
            f"failed to parse the request JSON buffer: {error.msg} at {error.pos}: {beginning}"
        ) from error


def _float(digits: str) -> float:
    return float(digits)


def _integer(digits: str) -> int | float:
    """Parse an integer as orjson does: beyond 64 bits as a float."""
    if len(digits) <= len("-9223372036854775808"):
        number = int(digits)
        if -1 << 63 <= number < 1 << 64:
            return number
    return float(digits)


def _member(owner: JsonObject, name: str, where: str) -> Any:
    try:
        return owner[name]
    except (KeyError, TypeError, IndexError):
        found = shown(owner)
        if type(owner) is dict:
            found = f"the members {listed(list(owner))}" if owner else "no members"
        raise invalid(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'{where}: "
            f"got {found}"
        ) from None


def string(owner: JsonObject, name: str, where: str = "") -> str:
    """Return a member that must be a string; ``where`` says whose it is in the error."""
    value = _member(owner, name, where)
    if type(value) is not str:
        raise wrong_type(value, "string", f"Unable to parse '{name}': ", where)
    return value


def array(owner: JsonObject, name: str, where: str = "") -> list[Any]:
    """Return a member that must be an array."""
    value = _member(owner, name, where)
    if type(value) is not list:
        raise wrong_type(value, "array", f"Unable to parse '{name}': ", where)
    return value


def unsigned(value: Any, name: str, where: str = "") -> int:
    """Return a value that must be a number of 0 or more."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise wrong_type(value, "unsigned-integer", f"Unable to parse '{name}': ", where)
    return value


def boolean(value: Any, name: str, where: str = "") -> bool:
    """Return a value that must be true or false."""
    if type(value) is not bool:
        raise wrong_type(value, "boolean", f"Unable to parse '{name}': ", where)
    return value


def json_parameters(
    parameters: JsonObject, texts: Mapping[str, bytes] = NO_TEXTS
) -> str | memoryview:
    """Return the parameters of a request as JSON for the model; long JSON as UTF-8.

    ``texts``: parameters that are JSON already.
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
    # orjson writes infinities as null, but models get them as Python's json writes them.
    return json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))


def long_id(nbytes: int) -> BridgeError:
    """Return the error for a too long id."""
    return invalid(f"expected a request id of at most {LONGEST_ID} bytes, got one of {nbytes}")


def malformed(reason: str) -> BridgeError:
    """Return Triton's error for a malformed gRPC message, with the reason as its cause."""
    error = BridgeError(MALFORMED, ErrorCode.INTERNAL)
    error.__cause__ = ValueError(reason)
    return error


def too_many_fields(most: int) -> BridgeError:
    """Return the error for a message with too many fields."""
    return invalid(
        f"expected a request of at most {most} fields, got more; send large data as "
        "raw_input_contents"
    )


def checked_id(identifier: str) -> str:
    """Return a request's id; raises BridgeError if it is too long."""
    if len(identifier) > LONGEST_ID // _LONGEST_CHARACTER:
        nbytes = len(identifier.encode(errors="replace"))
        if nbytes > LONGEST_ID:
            raise long_id(nbytes)
    return identifier


def text_of_sequence(value: str) -> str:
    """Return a string correlation id; raises BridgeError if it is too long."""
    if len(value.encode(errors="replace")) > _SEQUENCE_TEXT_BYTES:
        raise unsupported(
            f"string correlation ID cannot be longer than {_SEQUENCE_TEXT_BYTES} characters"
        )
    return value
