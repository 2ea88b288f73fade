"""Codec of BYTES tensors: each element is a little-endian ``uint32`` length and its bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError, invalid
from gpubridge.tensor.dtypes import element_count, numpy_dtype
from gpubridge.tensor.native import native

if TYPE_CHECKING:
    from numpy.typing import NDArray


_COUNTED = 100_000
_PIECE = 4096
INCOMPLETE_LENGTH = "Invalid bytes tensor data: incomplete length field"
STRING_BEYOND_BUFFER = "Invalid bytes tensor data: string extends beyond buffer"
_LENGTH = struct.Struct("<I")
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


def encode(array: NDArray[Any]) -> bytes:
    """Serialise an array of dtype object, ``S`` or ``U`` in C order.

    Elements that are not bytes are converted by ``str`` and encoded as UTF-8. Trailing NULs of ``S``
    and ``U`` are not data.

    Raises BridgeError: INVALID_ARG for an array of another dtype, or an element of 4 GiB and more.
    Raises UnicodeEncodeError if a string has no UTF-8 form (a lone surrogate).
    """
    if array.size == 0:
        return b""
    kind = array.dtype.kind
    if kind == "U":
        array, kind = np.char.encode(array, "utf-8"), "S"
    if kind == "S":
        return _encode_fixed_width(np.ascontiguousarray(array))
    if kind != "O":
        raise invalid(
            f"expected an array of dtype object, S or U for a BYTES tensor, got {array.dtype}"
        )
    module = native()
    if module is None:
        return _encode_objects(array.ravel().tolist())
    try:
        return module.bytes_encode(np.ascontiguousarray(array))
    except OverflowError as error:
        raise invalid(str(error)) from None


def _encode_objects(items: list[Any]) -> bytes:
    if set(map(type, items)) != {bytes}:
        items = [item if isinstance(item, bytes) else str(item).encode() for item in items]
    lengths = list(map(len, items))
    if max(lengths) > _LONGEST:
        raise invalid(
            f"expected strings of at most {_LONGEST} bytes in a BYTES tensor, got one of "
            f"{max(lengths)} bytes"
        )
    return b"".join(chain.from_iterable(zip(map(_LENGTH.pack, lengths), items)))


def _encode_fixed_width(array: NDArray[np.bytes_]) -> bytes:
    width = array.dtype.itemsize
    lengths = np.char.str_len(array).ravel().astype("<u4")
    records = np.empty((array.size, _LENGTH.size + width), np.uint8)
    records[:, : _LENGTH.size] = lengths.view(np.uint8).reshape(-1, _LENGTH.size)
    records[:, _LENGTH.size :] = np.frombuffer(array, np.uint8).reshape(-1, width)
    if (lengths == width).all():
        return records.tobytes()
    used = np.arange(records.shape[1]) < (lengths[:, np.newaxis] + _LENGTH.size)
    return records[used].tobytes()


def decode(buffer: Any, count: int | None = None) -> NDArray[np.object_]:
    """Deserialise a BYTES tensor of ``count`` strings to an array of ``bytes`` that owns its data.

    Another process may write to the buffer meanwhile: every length is checked when it is used, so a
    change causes an error or other strings, never a read beyond the end.

    Raises BridgeError: INVALID_ARG if it is malformed or does not hold exactly `count` strings.
    """
    module = native()
    if module is None:
        strings = _decode_strings(bytes(buffer))
        _check_count(len(strings), count)
        decoded = np.empty(len(strings), np.object_)
        decoded[:] = strings
        return decoded
    try:
        decoded = np.empty(module.bytes_count(buffer), np.object_)
        _check_count(decoded.size, count)
        module.bytes_decode(buffer, decoded)
    except ValueError as error:
        raise invalid(str(error)) from None
    return decoded


def _decode_strings(data: bytes) -> list[bytes]:
    strings: list[bytes] = []
    append = strings.append
    length_at = _LENGTH.unpack_from
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
        _check_count(len(_decode_strings(bytes(buffer))), count)
        return
    try:
        found = module.bytes_count(buffer)
    except ValueError as error:
        raise invalid(str(error)) from None
    _check_count(found, count)


def _check_count(found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise invalid(
            f"Invalid bytes tensor data: expected {expected} strings for the tensor's shape, got "
            f"{found}"
        )


def spell_values(datatype: str, shape: tuple[int, ...], data: bytes) -> Iterator[str]:
    """Format values as Triton's traces do: six digits, strings in quotes.

    Yields pieces to be joined by commas, so that other threads run in between. Malformed data yields
    a message; nothing is raised.
    """
    values: NDArray[Any]
    try:
        if datatype == "BYTES":
            values = decode(data, element_count(shape))
            for strings in _pieces(values):
                yield ",".join(f'"{string.decode(errors="replace")}"' for string in strings)
            return
        dtype = numpy_dtype(datatype)
        if dtype is None:
            # BF16 without ml_dtypes: the upper half of a float.
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(data, dtype)
    except (BridgeError, ValueError) as error:
        yield f"cannot be read: {error}"
        return
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind in "iu":
        for numbers in _pieces(values):
            yield ",".join(map(str, numbers))
        return
    for numbers in _pieces(values.astype(np.float64)):
        yield ",".join(f"{value:g}" for value in numbers)


def _pieces(values: NDArray[Any]) -> Iterator[list[Any]]:
    for at in range(0, len(values), _PIECE):
        yield values[at : at + _PIECE].tolist()
