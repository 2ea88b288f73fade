"""Tensor data as JSON values: to bytes for a request, from bytes for a response.

The compiled module packs the values of large requests from the text, without the interpreter's lock;
Python parses the rest of the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet
from typing import Any

from gpubridge import dataplane
from gpubridge.errors import BridgeError, invalid
from gpubridge.model_io import InputForm
from gpubridge.protocol.fields import parse_json, wrong_type
from gpubridge.protocol.long_strings import LongStrings
from gpubridge.tensor import strings
from gpubridge.tensor.datatypes import DATATYPES, element_count
from gpubridge.tensor.packed_numbers import numbers_to_bytes

_BINARY_ONLY = ("FP16", "BF16")
JSON_DATATYPES = frozenset(DATATYPES) - {*_BINARY_ONLY}
"""Datatypes whose values JSON can represent."""
_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)


def input_from_json(name: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> InputForm:
    """Return an input given as (possibly nested) JSON arrays.

    Strings may be more or fewer than the shape has elements: that is looked at after the shape, as in
    Triton.

    Raises BridgeError: with Triton's text, for values of a wrong type, or numbers of a wrong number;
    INVALID_ARG for one beyond the datatype's range.
    """
    if datatype in _BINARY_ONLY:
        raise invalid(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data "
            f"format for input {name}"
        )
    count = element_count(shape)
    values = list(_flat(data))
    # As in Triton, surplus values are an error whatever their type.
    _check_values(name, datatype, values[:count])
    if datatype == "BYTES":
        _check_values(name, datatype, values)
        encoded = strings.encode_strings(values)
        miscounted = len(values) != count
        return InputForm(name, datatype, shape, len(encoded), encoded, miscounted=miscounted)
    if len(values) != count:
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' has "
            f"the shape {list(shape)}, which is {count} values, got {len(values)}"
        )
    packed = numbers_to_bytes(name, datatype, values)
    return InputForm(name, datatype, shape, len(packed), packed)


def _flat(data: list[Any]) -> Iterator[Any]:
    """Yield the leaves of nested lists; an explicit stack, since clients choose the depth."""
    stack = [iter(data)]
    while stack:
        for value in stack[-1]:
            if type(value) is list:
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _check_values(name: str, datatype: str, values: list[Any]) -> None:
    kind, types, numbers = _kind(datatype)
    fits = set(map(type, values)) <= types
    if fits and (numbers is None or all(value in numbers for value in values)):
        return
    # The first value that does not fit.
    for at, value in enumerate(values):
        if type(value) not in types or (numbers is not None and value not in numbers):
            before = (
                f"Unable to parse {'JSON bytes array' if datatype == 'BYTES' else repr('data')}: "
            )
            where = f" for element {at} of input '{name}' ({datatype})"
            raise wrong_type(value, kind, before, where)


def _kind(datatype: str) -> tuple[str, AbstractSet[type], range | None]:
    """Return Triton's name of what values of a datatype are in JSON, their types and their range."""
    if datatype in _KINDS:
        return _KINDS[datatype]
    if datatype.startswith("FP"):
        return "number", {int, float}, None
    unsigned = datatype.startswith("UINT")
    return (
        ("unsigned-integer" if unsigned else "signed-integer"),
        {int},
        (_UINT64 if unsigned else _INT64),
    )


_KINDS: dict[str, tuple[str, AbstractSet[type], range | None]] = {
    "BOOL": ("boolean", {bool}, None),
    "BYTES": ("string", {str}, None),
}


def data_to_json(name: str, datatype: str, count: int, buffer: memoryview) -> bytes:
    """Return the JSON array of a tensor's values, flat; raises BridgeError."""
    if datatype in _BINARY_ONLY:
        raise invalid(
            f"sending {datatype} data via JSON is not supported. Please use the binary data "
            f"format for output {name}"
        )
    text = dataplane.format_json_values(buffer, datatype, count)
    if text is None:
        try:
            strings.validate(buffer, count)
        except BridgeError as error:
            raise BridgeError(f"output '{name}': {error.message}") from error
        raise BridgeError(
            f"output '{name}': {len(buffer)} bytes are no {count} elements of {datatype}"
        )
    return text


class NotPacked(Exception):
    """Values cannot be packed from their text: Python has to parse the whole document."""


class JsonValues:
    """The text of an array in a document.

    - ``document``: must not change.
    - ``start``, ``nbytes``: the place of the array in it, with its brackets.
    """

    __slots__ = ("_document", "_nbytes", "_start")

    def __init__(self, document: bytes | memoryview, start: int, nbytes: int) -> None:
        self._document = document
        self._start = start
        self._nbytes = nbytes

    def pack(self, datatype: str, count: int) -> bytes:
        """Return the values as the bytes of a tensor.

        ``datatype``: one of `JSON_DATATYPES`.

        Raises NotPacked for malformed JSON, and values of another type, number or range.
        """
        packed = dataplane.pack_json_values(
            self._document, self._start, self._nbytes, datatype, count
        )
        if packed is None:
            raise NotPacked
        return packed


def parse_without_values(document: bytes) -> tuple[Any, LongStrings]:
    """Parse a request's JSON; each array ``inputs[i].data`` becomes a `JsonValues`.

    Returns: the document, and the long strings that were removed from it.

    Raises NotPacked if there is nothing to remove.
    Raises BridgeError as `parse_json` does.
    """
    split = dataplane.split_json_data(document)
    if split is None:
        raise NotPacked
    skeleton, ranges = split
    long = LongStrings(skeleton)
    if not ranges and not long:
        raise NotPacked
    parsed = parse_json(long.document)
    if not ranges:
        return parsed, long
    entries = [
        entry for entry in parsed["inputs"] if type(entry) is dict and entry.get("data") == []
    ]
    if len(entries) != len(ranges):
        raise NotPacked
    for entry, (start, nbytes) in zip(entries, ranges, strict=True):
        entry["data"] = JsonValues(document, start, nbytes)
    return parsed, long
