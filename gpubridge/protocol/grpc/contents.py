"""Tensor data as typed protobuf fields (``InferTensorContents``) to bytes."""

from __future__ import annotations

import numpy as np

from gpubridge import dataplane
from gpubridge.config.schema import ProtoMessage
from gpubridge.errors import invalid
from gpubridge.tensor.dtypes import item_size, numbers_to_bytes

# Field, its number and how its values lie on the wire, the name Triton has for it, and the datatypes
# whose elements it may hold.
_FIELDS = (
    ("bool_contents", 1, "varint", "BOOL", ("BOOL",)),
    ("int_contents", 2, "varint", "INT32", ("INT8", "INT16", "INT32")),
    ("int64_contents", 3, "varint", "INT64", ("INT64",)),
    ("uint_contents", 4, "varint", "UINT32", ("UINT8", "UINT16", "UINT32")),
    ("uint64_contents", 5, "varint", "UINT64", ("UINT64",)),
    ("fp32_contents", 6, "fixed", "FP32", ("FP32",)),
    ("fp64_contents", 7, "fixed", "FP64", ("FP64",)),
    ("bytes_contents", 8, "bytes", "BYTES", ("BYTES",)),
)
_FIELD_BYTES = 4
"""Narrower elements come in fields that can hold more."""


def data_from_contents(
    entry: ProtoMessage, datatype: str, model: str, long: memoryview | None = None
) -> bytes:
    """Return the bytes of an input whose values came in typed fields; raises BridgeError.

    ``datatype``: what the input is said to be; FP16 and BF16 have no typed field. ``long``: all of its
    contents, serialised, where the entry only has one element of each field.
    """
    data: bytes | None = None
    for field, number, form, name, datatypes in _FIELDS:
        if not getattr(entry.contents, field):
            continue
        prefix = (
            f"unexpected explicit tensor data for input tensor '{entry.name}' for model '{model}'"
        )
        if data is not None:
            raise invalid(f"{prefix}, binary data was already supplied.")
        if datatype not in datatypes:
            raise invalid(f"{prefix} of type '{name}', expected datatype '{datatype}'")
        contents = entry.contents.SerializeToString() if long is None else long
        size = item_size(datatype) or 0
        narrow = form == "varint" and datatype != "BOOL" and size < _FIELD_BYTES
        data = dataplane.pack_typed_contents(
            contents, number, form, _FIELD_BYTES if narrow else size
        )
        assert data is not None  # it was parsed before
        if narrow:
            values = np.frombuffer(data, np.uint32 if name == "UINT32" else np.int32)
            data = numbers_to_bytes(entry.name, datatype, values)
    return data or b""
