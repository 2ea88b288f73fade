"""Datatypes of KServe v2 in all their notations.

One table relates the names on the wire (``FP32``), in ``config.pbtxt`` (``TYPE_FP32``), the numbers
of ``TRITONSERVER_DataType`` and NumPy's dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpubridge.errors import invalid


class Datatype(NamedTuple):
    """One datatype in all its notations.

    ``item_size`` is None for BYTES, whose elements differ in length; ``dtype`` is None for BF16, which
    NumPy has only with ml_dtypes (`bfloat16`).
    """

    name: str
    config_name: str
    number: int
    item_size: int | None
    dtype: np.dtype[Any] | None


_TABLE = (
    Datatype("BOOL", "TYPE_BOOL", 1, 1, np.dtype(np.bool_)),
    Datatype("UINT8", "TYPE_UINT8", 2, 1, np.dtype(np.uint8)),
    Datatype("UINT16", "TYPE_UINT16", 3, 2, np.dtype(np.uint16)),
    Datatype("UINT32", "TYPE_UINT32", 4, 4, np.dtype(np.uint32)),
    Datatype("UINT64", "TYPE_UINT64", 5, 8, np.dtype(np.uint64)),
    Datatype("INT8", "TYPE_INT8", 6, 1, np.dtype(np.int8)),
    Datatype("INT16", "TYPE_INT16", 7, 2, np.dtype(np.int16)),
    Datatype("INT32", "TYPE_INT32", 8, 4, np.dtype(np.int32)),
    Datatype("INT64", "TYPE_INT64", 9, 8, np.dtype(np.int64)),
    Datatype("FP16", "TYPE_FP16", 10, 2, np.dtype(np.float16)),
    Datatype("FP32", "TYPE_FP32", 11, 4, np.dtype(np.float32)),
    Datatype("FP64", "TYPE_FP64", 12, 8, np.dtype(np.float64)),
    Datatype("BYTES", "TYPE_STRING", 13, None, np.dtype(np.object_)),
    Datatype("BF16", "TYPE_BF16", 14, 2, None),
)

#: KServe name -> `Datatype`.
DATATYPES: dict[str, Datatype] = {entry.name: entry for entry in _TABLE}

#: NumPy dtype -> KServe name, for dtypes that equal one of the table; `datatype_from_numpy` has the
#: others, too (``S`` dtypes, ml_dtypes' bfloat16).
DATATYPE_OF_DTYPE: dict[np.dtype[Any], str] = {
    entry.dtype: entry.name for entry in _TABLE if entry.dtype is not None
}

#: KServe name -> NumPy dtype.
DTYPE_OF_DATATYPE: dict[str, np.dtype[Any]] = {
    entry.name: entry.dtype for entry in _TABLE if entry.dtype is not None
}


def _entry(datatype: str) -> Datatype:
    entry = DATATYPES.get(datatype)
    if entry is None:
        raise invalid(f"expected one of the datatypes {', '.join(DATATYPES)}, got '{datatype}'")
    return entry


def config_name(datatype: str) -> str:
    """Return the configuration name of a KServe datatype (``FP32`` -> ``TYPE_FP32``)."""
    return _entry(datatype).config_name


def datatype_from_numpy(dtype: np.dtype[Any]) -> str | None:
    """Return the KServe datatype of a NumPy dtype; None if there is none (complex, str, ...)."""
    datatype = DATATYPE_OF_DTYPE.get(dtype)
    if datatype is not None:
        return datatype
    if dtype.kind == "S":
        return "BYTES"
    # By name, so that ml_dtypes need not be imported.
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return "BF16"
    return None


def numpy_dtype(datatype: str) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a KServe datatype; None for BF16 without ml_dtypes."""
    dtype = DTYPE_OF_DATATYPE.get(datatype)
    if dtype is not None:
        return dtype
    return _entry(datatype).dtype or bfloat16()


def bfloat16() -> np.dtype[Any] | None:
    """Return ml_dtypes' bfloat16 dtype, or None without that package."""
    try:
        import ml_dtypes  # noqa: PLC0415  (optional)
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def numbers_to_bytes(name: str, datatype: str, values: Any) -> bytes:
    """Convert the numbers of an input to the bytes of its tensor.

    Raises BridgeError: INVALID_ARG for a number out of the datatype's range.
    """
    dtype = numpy_dtype(datatype)
    assert dtype is not None
    exact = {"u": np.uint64, "i": np.int64, "b": np.bool_}.get(dtype.kind)
    wide: np.ndarray[Any, Any] = np.array(values, exact or np.float64)
    with np.errstate(over="ignore"):
        numbers = wide.astype(dtype)
    lost = numbers != wide if exact else np.isinf(numbers) & ~np.isinf(wide)
    if lost.any():
        index = int(lost.argmax())
        raise invalid(
            f"element {index} of input '{name}' is {wide.flat[index]}, which is beyond the range of "
            f"{datatype}"
        )
    return numbers.tobytes()


def item_size(datatype: str) -> int | None:
    """Return the bytes of one element, or None for BYTES."""
    return _entry(datatype).item_size


def element_count(shape: Sequence[int]) -> int:
    """Count the elements of a shape; INVALID_ARG if a dimension is negative."""
    for dim in shape:
        if dim < 0:
            raise invalid(f"expected dimensions of 0 or more, got {dim} in shape {list(shape)}")
    return math.prod(shape)


def byte_size(datatype: str, shape: Sequence[int]) -> int:
    """Count the bytes of a tensor; INVALID_ARG for BYTES, whose size is in its data."""
    size = _entry(datatype).item_size
    if size is None:
        raise invalid("expected a datatype with elements of a fixed size, got BYTES")
    return size * element_count(shape)
