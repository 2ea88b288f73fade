"""The requests of one execution as arrays: what a model's ``execute_batch`` receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils.exceptions import TritonError, TritonModelException
from gpubridge.pb_utils.host import device_memory
from gpubridge.pb_utils.tensor import DeviceTensor, Tensor
from gpubridge.tensor.datatypes import byte_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubridge.pb_utils.request import InferenceRequest


class Batch:
    """The requests of one execution, with their rows stacked. An extension of gpubridge.

    ``batch["NAME"]`` is an input of all requests: an array of NumPy, or for inputs on the GPU a `Tensor`
    there, for ``torch.from_dlpack``. It is a view where the rows lie together in memory, as those of a
    single request do, else one copy.

    Attributes
    ----------
    requests : list of InferenceRequest
    sizes : list of int
        The rows of each request.
    names : list of str
        The inputs that the requests have.
    errors : dict of int to TritonError
        Filled by the model: a request's index, and the error that its caller gets alone.
    """

    __slots__ = ("_inputs", "_joined", "_padding", "errors", "names", "requests", "sizes")

    def __init__(
        self, requests: Sequence[InferenceRequest], padding: Mapping[str, Any] | None = None
    ) -> None:
        self.requests = list(requests)
        self._inputs = [request.inputs() for request in self.requests]
        self.sizes = [tensors[0]._shape[0] if tensors else 1 for tensors in self._inputs]
        self.names = [tensor._name for tensor in self._inputs[0]]
        self.errors: dict[int, TritonError] = {}
        self._padding = padding or {}
        self._joined: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> NDArray[Any] | Any:
        """Return an input's rows.

        Raises
        ------
        KeyError
            If the requests do not have the input.
        TritonModelException
            If only some have it, or rows of different shapes need padding (``BATCH_PADDING``).
        """
        if name not in self._joined:
            self._joined[name] = self._join(name)
        return self._joined[name]

    def get(self, name: str, default: Any = None) -> NDArray[Any] | Any:
        """Return an input's rows, or the default where the requests do not have the input."""
        return self[name] if name in self.names else default

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shape of an input in each request: what was there before padding."""
        return [tensor._shape for tensor in self._tensors(name)]

    def _tensors(self, name: str) -> list[Tensor]:
        tensors = [tensor for given in self._inputs for tensor in given if tensor._name == name]
        if not tensors:
            raise KeyError(name)
        if len(tensors) != len(self._inputs):
            raise TritonModelException(
                f"expected input '{name}' in all requests of a batch or in none, got it in "
                f"{len(tensors)} of {len(self._inputs)}"
            )
        return tensors

    def _join(self, name: str) -> Any:
        tensors = self._tensors(name)
        first = tensors[0]
        if len(tensors) == 1:
            return first.as_numpy() if first.is_cpu() else first
        ragged = any(tensor._shape[1:] != first._shape[1:] for tensor in tensors)
        if not ragged and all(tensor._device_bytes is not None for tensor in tensors):
            return _join_on_device(tensors)
        arrays = [tensor.as_numpy() for tensor in tensors]
        if ragged:
            return self._padded(name, arrays)
        return np.asarray(_Adjacent(arrays)) if _are_adjacent(arrays) else np.concatenate(arrays)

    def _padded(self, name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if name not in self._padding:
            raise TritonModelException(
                f"expected rows of one shape in input '{name}' of a batch, got "
                f"{', '.join(str(list(shape)) for shape in {a.shape[1:]: 0 for a in arrays})}; pad "
                'them with parameters { key: "BATCH_PADDING" value { string_value: "0" } }, or '
                "remove allow_ragged_batch"
            )
        longest = np.max([array.shape[1:] for array in arrays], axis=0)
        value = self._padding[name]
        whole = np.full((sum(self.sizes), *longest), value, arrays[0].dtype)
        begin = 0
        for array in arrays:
            part = whole[begin : begin + len(array)]
            part[(slice(None), *map(slice, array.shape[1:]))] = array
            begin += len(array)
        return whole


class _Adjacent:
    """Arrays that lie one after another, as one; the array made of it keeps them."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.arrays = arrays
        rows = sum(len(array) for array in arrays)
        first = dict(arrays[0].__array_interface__)
        read_only = not all(array.flags.writeable for array in arrays)
        self.__array_interface__ = {
            **first,
            "shape": (rows, *arrays[0].shape[1:]),
            "data": (first["data"][0], read_only),
        }


def _are_adjacent(arrays: Sequence[NDArray[Any]]) -> bool:
    if arrays[0].dtype.hasobject or not arrays[0].dtype.isbuiltin:
        return False
    end = arrays[0].__array_interface__["data"][0]
    for array in arrays:
        if array.__array_interface__["data"][0] != end:
            return False
        end += array.nbytes
    return True


def _join_on_device(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    parts = [tensor._device_bytes for tensor in tensors if tensor._device_bytes is not None]
    try:
        data = device_memory().join(parts)
    except BridgeError as error:
        raise TritonModelException(error.message) from None
    shape = sum(tensor._shape[0] for tensor in tensors), *first._shape[1:]
    return DeviceTensor._on_device(first._name, first._datatype, shape, data)


def rows_of(name: str, value: Any, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a stacked output into tensors of ``sizes`` rows each, without copies.

    Raises TritonModelException for another number of rows, and what `Tensor.from_dlpack` raises.
    """
    if not isinstance(value, (np.ndarray, Tensor)):
        is_array = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
        value = Tensor.from_dlpack(name, value) if is_array else np.asarray(value)
    shape = tuple(value.shape()) if isinstance(value, Tensor) else value.shape
    if not shape or shape[0] != sum(sizes):
        raise TritonModelException(
            f"expected {sum(sizes)} rows in output '{name}' of execute_batch, as its inputs have, got "
            f"the shape {list(shape)}"
        )
    ends = list(accumulate(sizes))
    parts = zip([0, *ends], ends)
    if isinstance(value, np.ndarray):
        return [Tensor(name, value[begin:end]) for begin, end in parts]
    return [_part(name, value, begin, end) for begin, end in parts]


def _part(name: str, tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return some rows of a tensor that is no array: a library's, or on the GPU."""
    if tensor._datatype == "BYTES":
        return Tensor(name, tensor.as_numpy()[begin:end])
    shape = end - begin, *tensor._shape[1:]
    row = byte_size(tensor._datatype, tensor._shape[1:])
    data = tensor._device_bytes
    if data is not None:
        part = data.part(begin * row, (end - begin) * row)
        return DeviceTensor._on_device(name, tensor._datatype, shape, part)
    # NumPy makes no array of a buffer without bytes.
    source = np.frombuffer(tensor._payload(), np.uint8).data if row else memoryview(b"")
    return Tensor._received(name, tensor._datatype, shape, source[begin * row : end * row])
