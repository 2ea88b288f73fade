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
    encoded: bytes = message_class(name)(**fields).SerializeToString(deterministic=True)
    return encoded
