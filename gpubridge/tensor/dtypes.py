"""NumPy's dtypes of KServe's datatypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpubridge.tensor.datatypes import datatype_of

#: KServe name -> NumPy dtype; BF16 has one only with ml_dtypes (`bfloat16`).
DTYPE_OF_DATATYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}

#: NumPy dtype -> KServe name, for dtypes that equal one of the table; `datatype_from_numpy` has the
#: others, too (``S`` dtypes, ml_dtypes' bfloat16).
DATATYPE_OF_DTYPE: dict[np.dtype[Any], str] = {
    dtype: datatype for datatype, dtype in DTYPE_OF_DATATYPE.items()
}


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
    datatype_of(datatype)
    return bfloat16()


def bfloat16() -> np.dtype[Any] | None:
    """Return ml_dtypes' bfloat16 dtype, or None without that package."""
    try:
        import ml_dtypes  # noqa: PLC0415  (optional)
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
