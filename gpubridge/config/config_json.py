"""A configuration as the JSON object that Triton's config endpoint prints."""

from __future__ import annotations

import struct
from collections.abc import MutableMapping, MutableSequence

from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from gpubridge.schema import ProtoMessage

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]

_FLOAT = struct.Struct("<f")

# 64-bit integers that Triton leaves as protobuf's text instead of numbers.
_INT64_AS_TEXT = frozenset(
    {
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelSequenceBatching.InitialState.dims",
    }
)

# Integral floats are printed without a fraction; beyond this a float no longer counts in ones.
_EXACT_INTEGER_LIMIT = 2**53


def message_to_triton_json(message: ProtoMessage) -> dict[str, JsonValue]:
    """Return `message` as the JSON object that Triton's config endpoint would print, in its order.

    Fields with presence (messages, members of a oneof) appear only when set; all others appear with
    their defaults. Enums are names.
    """
    result: dict[str, JsonValue] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        # By container type: FieldDescriptor.label is deprecated, is_repeated is missing before it.
        if isinstance(value, MutableMapping):
            entry = field.message_type.fields_by_name["value"]
            result[field.name] = {str(key): _one_value(entry, value[key]) for key in value}
        elif isinstance(value, MutableSequence):
            result[field.name] = [_one_value(field, item) for item in value]
        else:
            result[field.name] = _one_value(field, value)
    return result


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32."""
    for digits in range(6, 10):
        near = float(f"{value:.{digits}g}")
        if _FLOAT.pack(near) == _FLOAT.pack(value):
            return near
    return value


def _one_value(field: FieldDescriptor, value: ProtoMessage) -> JsonValue:
    if field.message_type is not None:
        return message_to_triton_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return int(value) if known is None else str(known.name)
    if field.full_name in _INT64_AS_TEXT:
        return str(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        # 0.1 stored as a float32 must print as 0.1, not as 0.10000000149011612.
        value = _shortest(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGER_LIMIT:
        return int(value)
    return value  # type: ignore[no-any-return]
