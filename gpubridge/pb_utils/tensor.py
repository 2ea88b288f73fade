"""Tensors as models see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.arguments import text
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.output_form import output_form, wants_device
from gpubridge.pb_utils.tensor_fields import EMPTY_NAME, TensorFields
from gpubridge.tensor import bytes_codec, cuda_array, dlpack
from gpubridge.tensor.dtypes import DATATYPES, element_count, numpy_dtype
from gpubridge.tensor.native import fields_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gpubridge.tensor.device_bytes import DeviceBytes


_BF16_TO_NUMPY = (
    "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
    "instead."
)
# The run of blanks is in Triton's own text.
_NOT_DLPACK = (
    "Provided tensor is not supported. Tensor must be a DLPack capsule         or have "
    "`__dlpack__` and `__dlpack_device__` attributes"
)

if TYPE_CHECKING:
    _Fields = TensorFields
else:
    _Fields = fields_type(TensorFields)


class Tensor(_Fields):
    """A named tensor; its data is a NumPy array's, another library's, or the bridge's.

    Parameters
    ----------
    name : str
        Not empty. Positional only, like the array.
    array : numpy.ndarray
        Any shape; bool, integer, float or bfloat16 (ml_dtypes), or object or ``S`` for strings.
        Numbers are referred to, not copied, unless they are not C-contiguous: do not change them
        once the tensor was sent. Strings are taken as they are now.

    Raises
    ------
    TypeError
        If `name` is not a str or `array` not an array.
    TritonModelException
        If the name is empty or the dtype has no counterpart.
    Exception
        What ``str()`` of an object raises, or a string that has no UTF-8 form.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    #: The data where it is in CUDA memory: a `DeviceTensor` then.
    _device_bytes: DeviceBytes | None = None

    @staticmethod
    def empty(name: str, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        """Make a tensor to be filled; its contents are undefined. This is gpubridge's own.

        On the GPU it lies in memory that can be handed to other models there as it is: fill what
        ``torch.from_dlpack(tensor)`` gives, say. `InferenceRequest.output` knows better places for
        what is an output of one request.

        Parameters
        ----------
        name : str
            Not empty.
        shape : sequence of int
        dtype : data-type
            NumPy's, a framework's, or a KServe name such as ``"BF16"``; of elements of a fixed size.
        device : str, int or object, optional
            None or ``"cpu"`` is the host; ``"cuda"``, ``"cuda:0"``, 0 or a framework's device the
            GPU that the model's instance is on.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If the name is empty, a dimension negative, the dtype has no counterpart or no fixed
            size, the device is none of the instance's, or its memory is full.
        """
        form = output_form(name, shape, dtype)
        if not wants_device(device):
            return Tensor(form.name, form.empty_array())
        # Models without a device need not load it.
        from gpubridge.pb_utils.device_tensor import DeviceTensor  # noqa: PLC0415

        return DeviceTensor._empty(form)

    @classmethod
    def _received(
        cls,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        buffer: memoryview,
        place: tuple[int, int, int, int] | None = None,
    ) -> Tensor:
        """Wrap a tensor that arrived: nothing is checked, copied or decoded here.

        The buffer is C-contiguous bytes of exactly the tensor; its lease ends with the last view of
        it.
        """
        tensor = object.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = shape
        tensor._source = buffer
        tensor._array = None
        tensor._place = place
        return tensor

    def triton_dtype(self) -> int:
        """Give the datatype as a number of ``TRITONSERVER_DataType``."""
        return DATATYPES[self._datatype].number

    def is_cpu(self) -> bool:
        """Tell whether the data is in host memory."""
        return True

    @property
    def device(self) -> str:
        """Device of the data: ``"cpu"``, or ``"cuda:0"`` with the number that frameworks use."""
        return "cpu"

    def _view(self, source: memoryview | None) -> NDArray[Any]:
        if self._datatype == "BYTES":
            try:
                return bytes_codec.decode(source, element_count(self._shape)).reshape(self._shape)
            except BridgeError as error:
                raise TritonModelException(error.message) from None
        dtype = numpy_dtype(self._datatype)
        if dtype is None:
            raise TritonModelException(_BF16_TO_NUMPY)
        # NumPy makes no array of a buffer without bytes.
        if not source:
            return np.empty(self._shape, dtype)
        # Not np.ndarray(..., buffer=source): that forgets the view, and with it the lease.
        return np.frombuffer(source, dtype).reshape(self._shape)

    def _payload(self) -> memoryview | NDArray[Any]:
        """Give the data as a C-contiguous buffer for sending; no copy.

        Strings are serialised as they were when the tensor came to be, whatever was done since to an
        array of them that was handed out.
        """
        if self._source is not None:
            return self._source
        array = self._array
        assert array is not None  # one of the two is always there
        # ml_dtypes' bfloat16 has no buffer format; its bytes have.
        return array.reshape(-1).view(np.uint8) if self._datatype == "BF16" else array

    def _shown(self) -> Any:
        """Give the data as a C-contiguous buffer that others may write to as the model may."""
        return self._payload()

    def to_dlpack(self) -> Any:
        """Give an unversioned DLPack capsule of the data; no copy.

        The capsule holds the tensor until its consumer lets go or, never consumed, until it is
        deleted. It cannot say that memory is read-only; ``from_dlpack(tensor)`` can. It carries no
        stream either: data in CUDA memory is there for what PyTorch and CuPy do on the streams that
        are current now. Where the model has imported neither, or another library that uses CUDA, it
        is waited for first, which ``from_dlpack(tensor)`` need not.

        Raises
        ------
        TritonModelException
            For strings.
        """
        return self._export(None)

    def __dlpack__(
        self,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Give a DLPack capsule.

        Parameters
        ----------
        stream : int or None, optional
            For data in CUDA memory, the stream that is to wait for it, as DLPack numbers them. A
            current stream of PyTorch or CuPy is kept as long as it is needed. Keep any other until
            the tensor is gone and the response is sent in which it travels, if it does.
        max_version : (int, int), optional
            The newest DLPack version that the consumer reads.
        dl_device : (int, int), optional
            Where the data is wanted: where it is, or on the host, ``(1, 0)``, by a copy.
        copy : bool, optional
            Whether it has to be, or must not be, a copy.

        Raises
        ------
        BufferError
            If the data is asked for on another device, or there without a copy.
        TritonModelException
            For strings, or if the device fails.
        """
        if dl_device is not None and tuple(dl_device) != (dlpack.CPU, 0):
            raise BufferError(
                f"expected dl_device to be the host, {(dlpack.CPU, 0)}, got {tuple(dl_device)}"
            )
        return self._export(max_version, bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Give DLPack's device type and id of the data."""
        return (dlpack.CPU, 0)

    def _export(self, max_version: tuple[int, int] | None, copied: bool = False) -> Any:
        owner: object = self
        # Strings are refused below; there is no point in serialising them first.
        memory: Any = b"" if self._datatype == "BYTES" else self._shown()
        if copied:
            owner = memory = bytearray(memory)
        try:
            return dlpack.export_host(
                owner, memory, self._datatype, self._shape, max_version, copied
            )
        except BridgeError as error:
            raise TritonModelException(error.message) from None

    @staticmethod
    def from_dlpack(name: str, tensor: Any, /) -> Tensor:
        """Make a tensor of another library's, without a copy.

        Parameters
        ----------
        name : str
            Not empty.
        tensor : object
            A DLPack capsule, or an object with ``__dlpack__`` and ``__dlpack_device__``, or with
            ``__cuda_array_interface__``. C-contiguous; in host memory, or in CUDA memory where the
            model's instance has a GPU. Its memory lives as long as this tensor or a view of it.
            Work that is on the producer's current stream by now is waited for, by the device; of a
            capsule, which names no stream, work on the default stream and on the current streams of
            PyTorch and CuPy.

        Raises
        ------
        TypeError
            If `name` is not a str.
        TritonModelException
            If the tensor cannot be taken.
        """
        name = text(name, "the tensor's name")
        if not name:
            raise TritonModelException(EMPTY_NAME)
        around = host.current()
        device = None if around is None else around.device
        stream, ordinal = None, 0
        try:
            if device is not None and dlpack.is_on_device(tensor):
                # Else the process goes on without a context of its GPU.
                stream, ordinal = device.stream, device.ordinal
            if dlpack.is_capsule(tensor):
                imported = dlpack.import_capsule(tensor, stream, ordinal)
            elif hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
                imported = dlpack.import_object(tensor, stream, ordinal)
            elif hasattr(tensor, "__cuda_array_interface__"):
                imported = cuda_array.import_cuda_array(tensor, stream, ordinal)
            else:
                raise TritonModelException(_NOT_DLPACK)
        except BridgeError as error:
            raise TritonModelException(error.message) from None
        memory = imported.memory
        if isinstance(memory, memoryview):
            return Tensor._received(name, imported.datatype, imported.shape, memory)
        # Models without a device need not load it.
        from gpubridge.pb_utils.device_tensor import DeviceTensor  # noqa: PLC0415

        return DeviceTensor._on_device(name, imported.datatype, imported.shape, memory)


class SharedTensor(Tensor):
    """An input that a caller, or another member of an ensemble, holds as well.

    What a model is shown of it is a copy: it may write there, as models do (``x *= 2``), and nobody
    else sees it. Handed on as a tensor it is what arrived, and nothing is copied.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_copy", "_own")

    _copy: Callable[[memoryview], memoryview]
    _own: memoryview | None

    def _belongs_to(self, copy: Callable[[memoryview], memoryview]) -> None:
        """Say who copies the data when the model looks at it."""
        self._own = None
        self._copy = copy

    def as_numpy(self) -> NDArray[Any]:  # noqa: D102
        array = self._array
        if array is None:
            # Strings are decoded: that is a copy already.
            source = self._source if self._datatype == "BYTES" else self._shown()
            array = self._array = self._view(source)
        return array

    def _shown(self) -> Any:
        source = self._source
        if not source:
            return self._payload()
        if self._own is None:
            self._own = self._copy(source)
        return self._own


class OutputTensor(Tensor):
    """Result of ``InferenceRequest.output()``: a tensor that is sent without a copy."""

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
