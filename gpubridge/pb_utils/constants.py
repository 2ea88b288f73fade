"""Flags and the datatype functions of ``triton_python_backend_utils``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import DATATYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_TYPE_OF_NUMBER: dict[int, type] = {
    entry.number: entry.dtype.type for entry in DATATYPES.values() if entry.dtype is not None
}
_NUMBER_OF_TYPE = {numpy_type: number for number, numpy_type in _TYPE_OF_NUMBER.items()}

#: Configuration name -> NumPy type. BF16 is not in it: NumPy has no such type.
TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    entry.config_name: bool if entry.name == "BOOL" else entry.dtype.type
    for entry in DATATYPES.values()
    if entry.dtype is not None
}


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Give the NumPy type of a ``TRITONSERVER_DataType`` number, or None (BF16 too)."""
    return _TYPE_OF_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Give the ``TRITONSERVER_DataType`` number of a NumPy type or dtype, or None."""
    if data_type is np.bytes_:
        return DATATYPES["BYTES"].number
    if isinstance(data_type, np.dtype):
        # An S dtype with a width is none of the types, as in Triton; nor is a foreign byte order.
        if not data_type.isnative:
            return None
        data_type = data_type.type
    elif data_type is np.longlong:
        data_type = np.int64
    return _NUMBER_OF_TYPE.get(data_type)


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Give the NumPy type of a configuration name; KeyError for an unknown one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Serialise an array of strings, each a little-endian ``uint32`` length and its bytes.

    Returns
    -------
    bytes, () or None
        An empty tuple for an array without elements, None for one that is not of dtype object or
        ``S``: models may test for either.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes_codec.encode(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """Give the strings of a serialised array as a one-dimensional object array of bytes.

    Raises
    ------
    BridgeError
        If the bytes are malformed.
    """
    return bytes_codec.decode(encoded_tensor)
