"""Form of a tensor that a model requests memory for, in the words of frameworks or in ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpubridge.pb_utils.arguments import integer, text, wrong_type
from gpubridge.pb_utils.device_memory import device_memory
from gpubridge.pb_utils.exceptions import NamedEnum, TritonModelException
from gpubridge.tensor.dtypes import DATATYPES, byte_size, datatype_from_numpy, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class OutputForm(NamedTuple):
    """Form of a requested tensor; the dtype is None for BF16 where ml_dtypes is not installed."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return byte_size(self.datatype, self.shape)

    def known_dtype(self) -> np.dtype[Any]:
        """Give NumPy's dtype, without which no array can be made, or raise TritonModelException."""
        if self.dtype is None:
            raise TritonModelException(
                f"output '{self.name}': NumPy has no BF16; install ml_dtypes, or make the tensor "
                "with a framework and from_dlpack()"
            )
        return self.dtype

    def empty_array(self) -> NDArray[Any]:
        """Make an array of this form; its contents are undefined."""
        return np.empty(self.shape, self.known_dtype())


def output_form(name: str, shape: Sequence[int], dtype: Any) -> OutputForm:
    """Check what a tensor is to be; raises as ``InferenceRequest.output()`` says."""
    name = text(name, "name")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    dims = tuple([integer(dim, "a dimension of shape", least=0) for dim in shape])
    datatype = _datatype_of(dtype)
    if datatype is None or datatype == "BYTES":
        raise TritonModelException(
            f"output '{name}': expected a dtype of a fixed size that has a counterpart, got "
            f"{dtype}; make a Tensor of strings instead"
        )
    return OutputForm(name, datatype, dims, numpy_dtype(datatype))


def _datatype_of(dtype: Any) -> str | None:
    if isinstance(dtype, str) and dtype in DATATYPES:
        return dtype
    try:
        return datatype_from_numpy(np.dtype(dtype))
    except TypeError:
        # A framework's, such as torch.float32; NumPy knows "bfloat16" only with ml_dtypes.
        word = str(dtype).rpartition(".")[2]
        if word == "bfloat16":
            return "BF16"
        try:
            return datatype_from_numpy(np.dtype(word))
        except TypeError:
            raise TypeError(
                f"expected a dtype as NumPy, a framework or KServe names it, got {dtype!r}"
            ) from None


def wants_device(device: Any) -> bool:
    """Tell whether a tensor is to be on the instance's GPU, or raise TritonModelException.

    ``device``: None or ``"cpu"`` is the host; ``"cuda"``, ``"cuda:0"`` or a framework's device that
    prints like this, or the GPU's number.
    """
    if device is None:
        return False
    wanted = f"cuda:{device}" if isinstance(device, int) else str(device)
    if wanted == "cpu":
        return False
    here = f"cuda:{device_memory().ordinal}"
    if wanted not in ("cuda", here):
        raise TritonModelException(
            f"expected device to be None, 'cpu', 'cuda' or '{here}', the GPU that the model's "
            f"instance is on, got {device!r}"
        )
    return True


class MemoryType(NamedEnum):
    """Kind of memory in which a caller wants the outputs of a model it calls."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


MemoryType.__module__ = "c_python_backend_utils"


class PreferredMemory:
    """Memory in which a caller wants the outputs of a model it calls.

    - ``preferred_memory_type``: ``TRITONSERVER_MEMORY_GPU`` or ``TRITONSERVER_MEMORY_CPU``.
    - ``preferred_device_id``: the GPU's ordinal.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise wrong_type("preferred_memory_type", "a MemoryType", preferred_memory_type)
        self._memory_type = preferred_memory_type
        self._device_id = integer(preferred_device_id, "preferred_device_id")
