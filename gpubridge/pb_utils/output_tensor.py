"""Output tensors whose memory is where they will be sent from, or where their client wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
