"""Strings of BYTES tensors: each is a little-endian ``uint32`` length and its bytes.

`gpubridge.tensor.bytes_codec` has the same for arrays; the server, which looks at few strings, does without NumPy.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

from gpubridge.errors import invalid
from gpubridge.tensor.native import native

_COUNTED = 100_000
INCOMPLETE_LENGTH = "Invalid bytes tensor data: incomplete length field"
STRING_BEYOND_BUFFER = "Invalid bytes tensor data: string extends beyond buffer"
LENGTH = struct.Struct("<I")
_LONGEST = 0xFFFFFFFF


def string_fault(identifier: str, name: str, model: str, buffer: memoryview, count: int) -> str:
    """Describe the error in a malformed BYTES input of ``count`` strings."""
    prefix = f"[request id: {identifier or '<id_unknown>'}] "
    found = at = length = 0
    while at < len(buffer):
        if found == _COUNTED:
            # A longer count would delay all other requests.
            return (
                f"{prefix}expected {count} string elements for inference input '{name}' for model "
                f"'{model}', got others: those after the first {found} do not add up to that number"
            )
        left = len(buffer) - at
        if left < 4:
            return (
                f"{prefix}incomplete string length indicator for inference input '{name}' for model "
                f"'{model}', expecting 4 bytes but only {left} bytes available. Please make sure the "
                "string length indicator is in one buffer."
            )
        length = int.from_bytes(buffer[at : at + 4], "little")
        at += 4 + length
        found += 1
        if found > count:
            return (
                f"{prefix}unexpected number of string elements {found} for inference input '{name}' "
                f"for model '{model}', expecting {count}"
            )
    if found < count:
        return (
            f"{prefix}expected {count} string elements for inference input '{name}' for model "
            f"'{model}', got {found}"
        )
    return (
        f"incomplete string data for inference input '{name}', expecting string of length {length} "
        f"but only {length - (at - len(buffer))} bytes available"
    )


def encode_strings(items: list[Any]) -> bytes:
    """Serialise strings; those that are not bytes are converted by ``str`` and encoded as UTF-8.

    Raises BridgeError: INVALID_ARG for an element of 4 GiB and more.
    Raises UnicodeEncodeError if a string has no UTF-8 form (a lone surrogate).
    """
    module = native()
    if module is None:
        return _encode_objects(items)
    try:
        return module.bytes_encode(items)
    except OverflowError as error:
        raise invalid(str(error)) from None


def _encode_objects(items: list[Any]) -> bytes:
    if set(map(type, items)) != {bytes}:
        items = [item if isinstance(item, bytes) else str(item).encode() for item in items]
    lengths = list(map(len, items))
    if max(lengths, default=0) > _LONGEST:
        raise invalid(
            f"expected strings of at most {_LONGEST} bytes in a BYTES tensor, got one of "
            f"{max(lengths)} bytes"
        )
    return b"".join(chain.from_iterable(zip(map(LENGTH.pack, lengths), items)))


def decode_strings(data: bytes) -> list[bytes]:
    """Deserialise a BYTES tensor; raises BridgeError: INVALID_ARG if it is malformed."""
    strings: list[bytes] = []
    append = strings.append
    length_at = LENGTH.unpack_from
    start, end = 0, len(data)
    while start < end:
        if end - start < 4:
            raise invalid(INCOMPLETE_LENGTH)
        stop = start + 4 + length_at(data, start)[0]
        if stop > end:
            raise invalid(STRING_BEYOND_BUFFER)
        append(data[start + 4 : stop])
        start = stop
    return strings


def validate(buffer: Any, count: int) -> None:
    """Raise INVALID_ARG unless a buffer is a well-formed BYTES tensor of `count` strings."""
    module = native()
    if module is None:
        check_count(len(decode_strings(bytes(buffer))), count)
        return
    try:
        found = module.bytes_count(buffer)
    except ValueError as error:
        raise invalid(str(error)) from None
    check_count(found, count)


def check_count(found: int, expected: int | None) -> None:
    """Raise INVALID_ARG unless as many strings were found as are expected; None: any number is."""
    if expected is not None and found != expected:
        raise invalid(
            f"Invalid bytes tensor data: expected {expected} strings for the tensor's shape, got "
            f"{found}"
        )
