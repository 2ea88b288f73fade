"""Datatypes as models name them, and the form of a tensor that a model requests memory for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpubridge.pb_utils.exceptions import TritonModelException, integer, text
from gpubridge.pb_utils.host import device_memory
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import DATATYPES, byte_size
from gpubridge.tensor.dtypes import DTYPE_OF_DATATYPE, datatype_from_numpy, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_TYPE_OF_NUMBER: dict[int, type] = {
    DATATYPES[name].number: dtype.type for name, dtype in DTYPE_OF_DATATYPE.items()
}
_NUMBER_OF_TYPE = {numpy_type: number for number, numpy_type in _TYPE_OF_NUMBER.items()}

#: Configuration name -> NumPy type. BF16 is not in it: NumPy has no such type.
TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    DATATYPES[name].config_name: bool if name == "BOOL" else dtype.type
    for name, dtype in DTYPE_OF_DATATYPE.items()
}


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Return the NumPy type of a ``TRITONSERVER_DataType`` number; None for BF16 and unknown ones."""
    return _TYPE_OF_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the ``TRITONSERVER_DataType`` number of a NumPy type or dtype, or None."""
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
    """Return the NumPy type of a configuration name; KeyError for an unknown one."""
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
    """Decode a serialised array of strings to a one-dimensional object array of bytes.

    Raises
    ------
    BridgeError
        If the bytes are malformed.
    """
    return bytes_codec.decode(encoded_tensor)


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
        """Return NumPy's dtype, or raise TritonModelException where NumPy has none."""
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
    """Check the form of a requested tensor; raises what ``InferenceRequest.output()`` documents."""
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
        # A framework's dtype, such as torch.float32; NumPy knows "bfloat16" only with ml_dtypes.
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
    """Return whether a tensor is to be on the instance's GPU; TritonModelException for another one.

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
