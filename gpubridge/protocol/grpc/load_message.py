"""Parsing of load messages; long files become views of the message, not copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpubridge.protocol.control import LoadParameters
from gpubridge.protocol.grpc.control import read_load
from gpubridge.protocol.grpc.messages import parse_message

_LONG = 1 << 16
_PARAMETERS = 3
_KEY, _VALUE = 1, 2
_BYTES = 4
_FILE = b"file:"
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}


def read_load_message(data: bytes | memoryview) -> tuple[str, LoadParameters]:
    """Return the model's name and the parameters of a RepositoryModelLoadRequest.

    Raises BridgeError as `read_load` does, and for a malformed message.
    """
    rest, files = _split(memoryview(data))
    message = parse_message("RepositoryModelLoadRequest", rest)
    config, short = read_load(message)
    return message.model_name, LoadParameters(config, {**short, **files})


class _Unusual(Exception):
    """A message that protobuf has to parse as a whole."""


class _Field(NamedTuple):
    """A field: its number, its length-delimited value if any, and all of its bytes."""

    number: int
    value: memoryview | None
    whole: memoryview


def _split(data: memoryview) -> tuple[bytes, dict[str, memoryview]]:
    """Return a message without its long files, and the files."""
    rest = []
    files = {}
    keys = set()
    try:
        for field in _fields(data):
            content = None
            if field.number == _PARAMETERS and field.value is not None:
                key, content = _entry(field.value)
                if key in keys:
                    raise _Unusual
                keys.add(key)
            if content is None:
                rest.append(field.whole)
            else:
                files[key.decode()] = content
    except (_Unusual, UnicodeDecodeError):
        return bytes(data), {}
    return b"".join(rest), files


def _entry(entry: memoryview) -> tuple[bytes, memoryview | None]:
    """Return the name of a parameter, and its content if it is a long file."""
    parts = {field.number: field.value for field in _fields(entry)}
    key, value = parts.get(_KEY), parts.get(_VALUE)
    if key is None or value is None or len(key) > _LONG:
        raise _Unusual
    name = bytes(key)
    if len(value) <= _LONG or not name.startswith(_FILE):
        return name, None
    contents = list(_fields(value))
    if [field.number for field in contents] != [_BYTES]:
        raise _Unusual
    return name, contents[0].value


def _fields(data: memoryview) -> Iterator[_Field]:
    """Return the fields of a message; raises _Unusual."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _varint(data, at)
        value = None
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        else:
            at += _FIXED.get(kind, len(data))
        if at > len(data):
            raise _Unusual
        yield _Field(tag >> 3, value, data[begin:at])


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and the offset after it; raises _Unusual."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _Unusual
