"""Codec of arrays of strings: BYTES tensors, as `gpubridge.tensor.strings` describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError, invalid
from gpubridge.tensor.datatypes import element_count
from gpubridge.tensor.dtypes import numpy_dtype
from gpubridge.tensor.native import native
from gpubridge.tensor.strings import LENGTH, check_count, decode_strings, encode_strings

if TYPE_CHECKING:
    from numpy.typing import NDArray


_PIECE = 4096


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
        return encode_strings(array.ravel().tolist())
    try:
        return module.bytes_encode(np.ascontiguousarray(array))
    except OverflowError as error:
        raise invalid(str(error)) from None


def _encode_fixed_width(array: NDArray[np.bytes_]) -> bytes:
    width = array.dtype.itemsize
    lengths = np.char.str_len(array).ravel().astype("<u4")
    records = np.empty((array.size, LENGTH.size + width), np.uint8)
    records[:, : LENGTH.size] = lengths.view(np.uint8).reshape(-1, LENGTH.size)
    records[:, LENGTH.size :] = np.frombuffer(array, np.uint8).reshape(-1, width)
    if (lengths == width).all():
        return records.tobytes()
    used = np.arange(records.shape[1]) < (lengths[:, np.newaxis] + LENGTH.size)
    return records[used].tobytes()


def decode(buffer: Any, count: int | None = None) -> NDArray[np.object_]:
    """Deserialise a BYTES tensor of ``count`` strings to an array of ``bytes`` that owns its data.

    Another process may write to the buffer meanwhile: every length is checked when it is used, so a
    change causes an error or other strings, never a read beyond the end.

    Raises BridgeError: INVALID_ARG if it is malformed or does not hold exactly `count` strings.
    """
    module = native()
    if module is None:
        strings = decode_strings(bytes(buffer))
        check_count(len(strings), count)
        decoded = np.empty(len(strings), np.object_)
        decoded[:] = strings
        return decoded
    try:
        decoded = np.empty(module.bytes_count(buffer), np.object_)
        check_count(decoded.size, count)
        module.bytes_decode(buffer, decoded)
    except ValueError as error:
        raise invalid(str(error)) from None
    return decoded


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
