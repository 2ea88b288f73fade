"""Configurations in JSON as Triton reads them: one value for a list, ``"true"`` for true, and the like.

protobuf's parser in C++, which Triton uses, takes forms that the one in Python refuses, and the other
way round. They are turned into the forms of Python's parser, which then reads the configuration.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.descriptor import (  # type: ignore[import-untyped]
    Descriptor,
    FieldDescriptor,
)

from gpubridge.schema import ProtoMessage, message_class

_TRUE = ("true", "t", "yes", "y", "1")
_FALSE = ("false", "f", "no", "n", "0")
_INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)


def message_from_json(values: dict[str, Any]) -> ProtoMessage:
    """Return the ModelConfig of a JSON object.

    Raises ParseError of protobuf, ValueError or TypeError for a value of another kind.
    """
    message = message_class("ModelConfig")()
    json_format.ParseDict(_plain_object(values, message.DESCRIPTOR), message)
    return message


def _plain_object(values: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    by_name = {field.name: field for field in descriptor.fields}
    by_name |= {field.json_name: field for field in descriptor.fields}
    return {
        name: _plain_member(by_name[name], value) if name in by_name else value
        for name, value in values.items()
    }


def _plain_member(field: FieldDescriptor, value: Any) -> Any:
    if _is_map(field):
        entry = field.message_type.fields_by_name["value"]
        if not isinstance(value, dict):
            return value
        empty: Any = {} if entry.message_type is not None else entry.default_value
        return {
            key: _plain_value(entry, empty if each is None else each) for key, each in value.items()
        }
    if not _is_repeated(field):
        return _plain_value(field, value)
    if value is None:
        return None
    return [_plain_value(field, each) for each in _flat(value)]


def _flat(value: Any) -> list[Any]:
    """Return the values in a list, in lists in it, or one value that is no list; null is none."""
    found: list[Any] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += reversed(each)
        elif each is not None:
            found.append(each)
    return found


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if value is None:
        # As if it were left out.
        return None
    if field.message_type is not None:
        return _plain_object(value, field.message_type) if isinstance(value, dict) else value
    if field.enum_type is not None:
        return _plain_enum(field, value)
    if not isinstance(value, str):
        return value
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if field.cpp_type in _INTEGERS and not _INTEGER.fullmatch(value):
        raise ValueError(f"{field.name}: expected an integer, got {value[:40]!r}")
    return value


def _plain_enum(field: FieldDescriptor, value: Any) -> Any:
    """Return the name of an enumeration's value as the schema spells it, or its number."""
    if type(value) in (int, float):
        return value
    name = str(value)
    for spelt in (name, name.upper().replace("-", "_")):
        if spelt in field.enum_type.values_by_name:
            return spelt
    if _INTEGER.fullmatch(name) and int(name[:12]) in field.enum_type.values_by_number:
        return int(name)
    raise ValueError(f"{field.name}: expected a name of {field.enum_type.name}, got {name[:40]!r}")


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _is_repeated(field: FieldDescriptor) -> bool:
    # FieldDescriptor.label is deprecated, and is_repeated is missing before protobuf 6.
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)
