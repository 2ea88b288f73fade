"""Fields of a tensor in Python; the compiled module has the same as a C type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils.arguments import text, wrong_type
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.dtypes import DATATYPE_OF_DTYPE, datatype_from_numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

EMPTY_NAME = "Tensor name cannot be an empty string."


class TensorFields:
    """The fields of a tensor; :class:`~gpubridge.pb_utils.Tensor` says what they are."""

    # What is sent is _source, if that is there, and else _array; _array is also the cache of as_numpy().
    __slots__ = ("_array", "_datatype", "_name", "_place", "_shape", "_source")

    _array: NDArray[Any] | None
    _datatype: str
    _name: str
    _place: tuple[int, int, int, int] | None
    _shape: tuple[int, ...]
    _source: memoryview | None

    def __init__(self, name: str, array: NDArray[Any], /) -> None:
        if not isinstance(name, str):
            name = text(name, "the tensor's name")
        if not isinstance(array, np.ndarray):
            raise wrong_type("the tensor's data", "numpy.ndarray", array)
        if not name:
            raise TritonModelException(EMPTY_NAME)
        datatype = DATATYPE_OF_DTYPE.get(array.dtype) or datatype_from_numpy(array.dtype)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        self._name = name
        self._datatype = datatype
        self._shape = array.shape
        self._array = array
        # Now, not when it is sent: the model may fill the same array for its next tensor.
        self._source = _encoded(array) if datatype == "BYTES" else None
        self._place = None

    def name(self) -> str:
        """Give the name."""
        return self._name

    def shape(self) -> list[int]:
        """Give the dimensions as a new list."""
        return list(self._shape)

    def as_numpy(self) -> NDArray[Any]:
        """Give the data as an array, the same one at each call.

        Returns
        -------
        numpy.ndarray
            For a numeric tensor that arrived, a view of the memory it arrived in, which the array
            keeps alive; read-only where that memory is. For strings, dtype object, of ``bytes``.
            Of data in CUDA memory, a copy: editing it changes no tensor, and it is made again at
            each call where others may have written to that memory in between.

        Raises
        ------
        TritonModelException
            For BF16 where ml_dtypes is not installed, or strings that are malformed.
        """
        array = self._array
        if array is None:
            array = self._array = self._view(self._source)
        return array

    if TYPE_CHECKING:

        def _view(self, source: memoryview | None) -> NDArray[Any]:
            """Make an array of the data; in the class that users see."""


def _encoded(array: NDArray[Any]) -> memoryview:
    try:
        return memoryview(bytes_codec.encode(array))
    except BridgeError as error:
        raise TritonModelException(error.message) from None
