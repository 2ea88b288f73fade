"""The values of a tensor as text, for people and for files that people read."""

from __future__ import annotations

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import element_count, numpy_dtype

__all__ = ["spell_values"]


def spell_values(datatype: str, shape: tuple[int, ...], data: bytes) -> str:
    """Spell values as Triton's traces do: commas between, six digits, strings in quotes.

    What cannot be read is said instead; nothing is raised.
    """
    try:
        if datatype == "BYTES":
            strings = bytes_codec.decode(data, element_count(shape)).tolist()
            return ",".join(f'"{string.decode(errors="replace")}"' for string in strings)
        dtype = numpy_dtype(datatype)
        if dtype is None:
            # BF16 without a library that knows it: the upper half of a float.
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(data, dtype)
    except (BridgeError, ValueError) as error:
        return f"cannot be read: {error}"
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind in "iu":
        return ",".join(map(str, values.tolist()))
    return ",".join(f"{value:g}" for value in values.astype(np.float64).tolist())
