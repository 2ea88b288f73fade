"""Datatypes of KServe v2 by their names, numbers and sizes; `gpubridge.tensor.dtypes` adds those of NumPy.

One table relates the names on the wire (``FP32``), in ``config.pbtxt`` (``TYPE_FP32``) and the numbers of
``TRITONSERVER_DataType``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gpubridge.errors import invalid


class Datatype(NamedTuple):
    """One datatype; ``item_size`` is None for BYTES, whose elements differ in length."""

    name: str
    config_name: str
    number: int
    item_size: int | None


_TABLE = (
    Datatype("BOOL", "TYPE_BOOL", 1, 1),
    Datatype("UINT8", "TYPE_UINT8", 2, 1),
    Datatype("UINT16", "TYPE_UINT16", 3, 2),
    Datatype("UINT32", "TYPE_UINT32", 4, 4),
    Datatype("UINT64", "TYPE_UINT64", 5, 8),
    Datatype("INT8", "TYPE_INT8", 6, 1),
    Datatype("INT16", "TYPE_INT16", 7, 2),
    Datatype("INT32", "TYPE_INT32", 8, 4),
    Datatype("INT64", "TYPE_INT64", 9, 8),
    Datatype("FP16", "TYPE_FP16", 10, 2),
    Datatype("FP32", "TYPE_FP32", 11, 4),
    Datatype("FP64", "TYPE_FP64", 12, 8),
    Datatype("BYTES", "TYPE_STRING", 13, None),
    Datatype("BF16", "TYPE_BF16", 14, 2),
)

#: KServe name -> `Datatype`.
DATATYPES: dict[str, Datatype] = {entry.name: entry for entry in _TABLE}


def datatype_of(datatype: str) -> Datatype:
    """Return a datatype by its KServe name; INVALID_ARG if there is none."""
    entry = DATATYPES.get(datatype)
    if entry is None:
        raise invalid(f"expected one of the datatypes {', '.join(DATATYPES)}, got '{datatype}'")
    return entry


def config_name(datatype: str) -> str:
    """Return the configuration name of a KServe datatype (``FP32`` -> ``TYPE_FP32``)."""
    return datatype_of(datatype).config_name


def item_size(datatype: str) -> int | None:
    """Return the bytes of one element, or None for BYTES."""
    return datatype_of(datatype).item_size


def element_count(shape: Sequence[int]) -> int:
    """Count the elements of a shape; INVALID_ARG if a dimension is negative."""
    for dim in shape:
        if dim < 0:
            raise invalid(f"expected dimensions of 0 or more, got {dim} in shape {list(shape)}")
    return math.prod(shape)


def byte_size(datatype: str, shape: Sequence[int]) -> int:
    """Count the bytes of a tensor; INVALID_ARG for BYTES, whose size is in its data."""
    size = datatype_of(datatype).item_size
    if size is None:
        raise invalid("expected a datatype with elements of a fixed size, got BYTES")
    return size * element_count(shape)
