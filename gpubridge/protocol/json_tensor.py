"""Tensor data as JSON values: to bytes for a request, from bytes for a response.

The compiled module packs the values of large requests from the text, without the interpreter's lock;
Python parses the rest of the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpubridge import dataplane
from gpubridge.errors import BridgeError, invalid
from gpubridge.model_io import InputForm
from gpubridge.protocol.fields import internal, parse_json
from gpubridge.protocol.long_strings import LongStrings
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import DATATYPES, element_count, numbers_to_bytes

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
    _check_values(datatype, values[:count])
    if datatype == "BYTES":
        _check_values(datatype, values)
        encoded = bytes_codec.encode(np.array(values, dtype=object))
        miscounted = len(values) != count
        return InputForm(name, datatype, shape, len(encoded), encoded, miscounted=miscounted)
    if len(values) != count:
        raise internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
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


def _check_values(datatype: str, values: list[Any]) -> None:
    kinds = set(map(type, values))
    wrong: str | None = None
    if datatype == "BYTES":
        if kinds - {str}:
            raise internal(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
    elif datatype == "BOOL":
        wrong = "non-boolean as boolean" if kinds - {bool} else None
    elif datatype.startswith("FP"):
        wrong = "non-number as double" if kinds - {int, float} else None
    elif datatype.startswith("UINT"):
        fits = not kinds - {int} and all(value in _UINT64 for value in values)
        wrong = None if fits else "non-unsigned-integer as unsigned-integer"
    else:
        fits = not kinds - {int} and all(value in _INT64 for value in values)
        wrong = None if fits else "non-signed-integer as signed-integer"
    if wrong is not None:
        raise internal(f"Unable to parse 'data': attempt to access JSON {wrong}")


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
            bytes_codec.decode(buffer, count)
        except BridgeError as error:
            raise internal(f"output '{name}': {error.message}") from error
        raise internal(
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
