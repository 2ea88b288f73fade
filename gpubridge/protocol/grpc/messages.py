"""Messages of the v2 protocol as bytes."""

from __future__ import annotations

from typing import Any

from google.protobuf import message  # type: ignore[import-untyped]

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.fields import MALFORMED
from gpubridge.schema import ProtoMessage, message_class


def parse_message(name: str, data: bytes | memoryview) -> ProtoMessage:
    """Parse a request's message; raises BridgeError."""
    try:
        return message_class(name).FromString(bytes(data))
    except message.DecodeError as error:
        raise BridgeError(MALFORMED, ErrorCode.INTERNAL) from error


def encode_message(name: str, /, **fields: Any) -> bytes:
    """Return the bytes of a message with these fields."""
    maps = {field: value for field, value in fields.items() if isinstance(value, dict)}
    made = message_class(name)(**{k: value for k, value in fields.items() if k not in maps})
    for field, entries in maps.items():
        # Before protobuf 6 constructors take no dict for a message in a map.
        values = getattr(made, field)
        for key, members in entries.items():
            values[key].MergeFrom(type(values[key])(**members))
    encoded: bytes = made.SerializeToString(deterministic=True)
    return encoded
