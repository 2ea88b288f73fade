"""Tensor data as typed protobuf fields (``InferTensorContents``) to bytes."""

from __future__ import annotations

import struct

import numpy as np

from gpubridge.config.schema import ProtoMessage
from gpubridge.protocol.fields import invalid
from gpubridge.tensor.dtypes import numpy_dtype

__all__ = ["data_from_contents"]

# Field, the name Triton has for it, and the datatypes whose elements it may hold.
_FIELDS = (
    ("bool_contents", "BOOL", ("BOOL",)),
    ("int_contents", "INT32", ("INT8", "INT16", "INT32")),
    ("int64_contents", "INT64", ("INT64",)),
    ("uint_contents", "UINT32", ("UINT8", "UINT16", "UINT32")),
    ("uint64_contents", "UINT64", ("UINT64",)),
    ("fp32_contents", "FP32", ("FP32",)),
    ("fp64_contents", "FP64", ("FP64",)),
    ("bytes_contents", "BYTES", ("BYTES",)),
)

_LENGTH = struct.Struct("<I")


def data_from_contents(entry: ProtoMessage, datatype: str, model: str) -> bytes:
    """Return the bytes of an input whose values came in typed fields.

    Parameters
    ----------
    entry : InferInputTensor
        The input.
    datatype : str
        What the input is said to be; FP16 and BF16 have no typed field.

    Raises
    ------
    BridgeError
        INVALID_ARG, in Triton's words, for values in another field than the datatype's.
    """
    data: bytes | None = None
    for field, name, datatypes in _FIELDS:
        values = getattr(entry.contents, field)
        if not values:
            continue
        prefix = (
            f"unexpected explicit tensor data for input tensor '{entry.name}' for model '{model}'"
        )
        if data is not None:
            raise invalid(f"{prefix}, binary data was already supplied.")
        if datatype not in datatypes:
            raise invalid(f"{prefix} of type '{name}', expected datatype '{datatype}'")
        if datatype == "BYTES":
            data = b"".join(_LENGTH.pack(len(value)) + value for value in values)
        else:
            # Values beyond the type wrap, as Triton's do.
            wide = np.fromiter(values, numpy_dtype(name), len(values))
            data = wide.astype(numpy_dtype(datatype)).tobytes()
    return data or b""
