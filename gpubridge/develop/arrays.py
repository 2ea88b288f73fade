"""Arrays of NumPy as tensors in wire format, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpubridge.errors import invalid
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import element_count
from gpubridge.tensor.dtypes import datatype_from_numpy, numpy_dtype


def encode_array(name: str, value: Any, expected: str) -> tuple[str, tuple[int, ...], bytes]:
    """Return datatype, shape and bytes of an array-like.

    Raises BridgeError: INVALID_ARG with the ``expected`` datatype for a dtype without a counterpart.
    """
    array = np.asarray(value)
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    native = array.dtype.newbyteorder("=")
    datatype = datatype_from_numpy(native)
    if datatype is None:
        raise invalid(f"input '{name}': expected {expected}, got an array of {array.dtype}")
    if datatype == "BYTES":
        return datatype, array.shape, bytes_codec.encode(array)
    return datatype, array.shape, np.ascontiguousarray(array, native).tobytes()


def decode_array(datatype: str, shape: Sequence[int], buffer: Any) -> NDArray[Any]:
    """Return a copy of a tensor as an array; strings are ``bytes``, BF16 without ml_dtypes UINT16."""
    if datatype == "BYTES":
        return bytes_codec.decode(buffer, element_count(shape)).reshape(shape)
    dtype = numpy_dtype(datatype) or np.dtype(np.uint16)
    return np.frombuffer(bytearray(buffer), dtype).reshape(shape)
