"""Output tensors whose memory is where they will be sent from, or where their client wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.pb_utils.arguments import integer, text
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.tensor import Tensor
from gpubridge.tensor.dtypes import datatype_from_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["OutputTensor", "output_form"]


class OutputTensor(Tensor):
    """What ``InferenceRequest.output()`` gives: a tensor that need not be copied to be sent."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_final",)

    _final: object

    @classmethod
    def _placed(cls, name: str, datatype: str, array: NDArray[Any], place: object) -> OutputTensor:
        """Wrap an array that lies in its place."""
        tensor = object.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = array.shape
        tensor._array = array
        tensor._source = None
        tensor._place = None
        tensor._final = place
        return tensor


def output_form(
    name: str, shape: Sequence[int], dtype: Any
) -> tuple[np.dtype[Any], str, tuple[int, ...]]:
    """Check what an output tensor is to be; returns its dtype, datatype and dims.

    Raises
    ------
    TypeError, TritonModelException
        As ``InferenceRequest.output()`` says.
    """
    known = np.dtype(dtype)
    if not text(name, "name"):
        raise TritonModelException("Tensor name cannot be an empty string.")
    dims = tuple([integer(dim, "a dimension of shape", least=0) for dim in shape])
    datatype = datatype_from_numpy(known)
    if datatype is None or datatype == "BYTES":
        raise TritonModelException(
            f"output '{name}': expected a NumPy dtype of a fixed size that has a counterpart, got "
            f"{known}; make a Tensor of strings instead"
        )
    return known, datatype, dims
