"""Tensors as models see them, in host memory and in CUDA memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.datatypes import OutputForm, output_form, wants_device
from gpubridge.pb_utils.exceptions import TritonModelException, text, wrong_type
from gpubridge.pb_utils.host import device_memory
from gpubridge.tensor import bytes_codec, cuda_array, dlpack
from gpubridge.tensor.datatypes import DATATYPES, byte_size, element_count
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.tensor.dtypes import DATATYPE_OF_DTYPE, datatype_from_numpy, numpy_dtype
from gpubridge.tensor.native import fields_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EMPTY_NAME = "Tensor name cannot be an empty string."
_BF16_TO_NUMPY = (
    "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
    "instead."
)
# The run of blanks is in Triton's own text.
_NOT_DLPACK = (
    "Provided tensor is not supported. Tensor must be a DLPack capsule         or have "
    "`__dlpack__` and `__dlpack_device__` attributes"
)


class TensorFields:
    """Fields of a `Tensor` in Python; the compiled module has the same as a C type."""

    # _source is sent, or _array where _source is None; _array is also the cache of as_numpy().
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
        # A derived class may say anything of itself.
        plain = np.asarray(array)
        datatype = DATATYPE_OF_DTYPE.get(plain.dtype) or datatype_from_numpy(plain.dtype)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        if not plain.flags.c_contiguous:
            array = plain = np.ascontiguousarray(array)
        self._name = name
        self._datatype = datatype
        self._shape = plain.shape
        self._array = array
        # Encoded now, not when it is sent: the model may reuse the array for its next tensor.
        self._source = _encoded(array) if datatype == "BYTES" else None
        self._place = None

    def name(self) -> str:
        """Return the name."""
        return self._name

    def shape(self) -> list[int]:
        """Return the dimensions as a new list."""
        return list(self._shape)

    def as_numpy(self) -> NDArray[Any]:
        """Return the data as an array, the same one at each call.

        Returns
        -------
        numpy.ndarray
            For a received numeric tensor, a view of the memory it was received in, which the array
            keeps alive; read-only where that memory is. For strings, an object array of ``bytes``.
            For data in CUDA memory, a copy: editing it does not change the tensor, and each call
            copies anew where others may have written to that memory in between.

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
            """Make an array of the data; implemented by `Tensor`."""


def _encoded(array: NDArray[Any]) -> memoryview:
    try:
        return memoryview(bytes_codec.encode(array))
    except BridgeError as error:
        raise TritonModelException(error.message) from None


if TYPE_CHECKING:
    _Fields = TensorFields
else:
    _Fields = fields_type(TensorFields)


class Tensor(_Fields):
    """A named tensor over a NumPy array, another library's memory, or memory of the bridge.

    Parameters
    ----------
    name : str
        Not empty. Positional only, like the array.
    array : numpy.ndarray
        Any shape; bool, integer, float or bfloat16 (ml_dtypes), or object or ``S`` for strings.
        Numbers are copied only if they are not C-contiguous: do not change the array once the
        tensor was sent. Strings are encoded at once.

    Raises
    ------
    TypeError
        If `name` is not a str or `array` not an array.
    TritonModelException
        If the name is empty or the dtype has no counterpart.
    Exception
        If ``str()`` of an object raises, or a string has no UTF-8 form.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ()

    #: The data in CUDA memory, for a `DeviceTensor`.
    _device_bytes: DeviceBytes | None = None

    @staticmethod
    def empty(name: str, shape: Sequence[int], dtype: Any, device: Any = None) -> Tensor:
        """Make a tensor to be filled; its contents are undefined. An extension of gpubridge.

        On the GPU its memory reaches other models there without a copy: fill the result of
        ``torch.from_dlpack(tensor)``, for example. For an output of one request prefer
        `InferenceRequest.output`.

        Parameters
        ----------
        name : str
            Not empty.
        shape : sequence of int
        dtype : data-type
            NumPy's, a framework's, or a KServe name such as ``"BF16"``; of elements of a fixed size.
        device : str, int or object, optional
            None or ``"cpu"`` for host memory; ``"cuda"``, ``"cuda:0"``, 0 or a framework's device
            for the GPU of the model's instance.

        Raises
        ------
        TypeError
            If an argument is of another type.
        TritonModelException
            If the name is empty, a dimension negative, the dtype has no counterpart or no fixed
            size, the device is not the instance's, or its memory is full.
        """
        form = output_form(name, shape, dtype)
        if wants_device(device):
            return DeviceTensor._empty(form)
        return Tensor(form.name, form.empty_array())

    @classmethod
    def _received(
        cls,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        buffer: memoryview,
        place: tuple[int, int, int, int] | None = None,
    ) -> Tensor:
        """Wrap a received tensor without checking, copying or decoding it.

        The buffer holds exactly the tensor's C-contiguous bytes; its lease ends with the last view of
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
        """Return the datatype as a number of ``TRITONSERVER_DataType``."""
        return DATATYPES[self._datatype].number

    def is_cpu(self) -> bool:
        """Return whether the data is in host memory."""
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
        """Return the data as a C-contiguous buffer for sending, without a copy.

        Strings are those of the tensor's construction, whatever was written since to the array that
        `as_numpy` returned. Raises TritonModelException if the model has resized its array since.
        """
        if self._source is not None:
            return self._source
        assert self._array is not None  # either _source or _array is set
        array = np.asarray(self._array)
        if array.shape != self._shape and array.nbytes != byte_size(self._datatype, self._shape):
            raise TritonModelException(
                f"tensor '{self._name}': expected the {byte_size(self._datatype, self._shape)} bytes "
                f"of {self._datatype} {list(self._shape)}, of which it was made, got {array.nbytes}: "
                "its array was resized since; make a tensor of the resized array"
            )
        # ml_dtypes' bfloat16 has no buffer format.
        return array.reshape(-1).view(np.uint8) if self._datatype == "BF16" else array

    def _shown(self) -> Any:
        """Return the data as a C-contiguous buffer that the model may write to."""
        return self._payload()

    def to_dlpack(self) -> Any:
        """Return an unversioned DLPack capsule of the data, without a copy.

        The capsule keeps the tensor alive until its consumer releases it or, if never consumed, until
        the capsule is deleted. It cannot mark memory as read-only; ``from_dlpack(tensor)`` can. It
        names no stream either: data in CUDA memory is ready for work of PyTorch and CuPy on their
        current streams. Where the model has imported neither, or another library that uses CUDA,
        this call waits for the data, which ``from_dlpack(tensor)`` need not.

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
        """Return a DLPack capsule.

        Parameters
        ----------
        stream : int or None, optional
            For data in CUDA memory, the consumer's stream, as DLPack numbers them; it waits for the
            data. A current stream of PyTorch or CuPy is kept alive as long as it is needed. Keep any
            other stream alive until the tensor is deleted and the response that it is part of, if
            any, is sent.
        max_version : (int, int), optional
            The newest DLPack version that the consumer supports.
        dl_device : (int, int), optional
            The requested device: the data's own, or the host, ``(1, 0)``, which takes a copy.
        copy : bool, optional
            True requires a copy, False forbids one.

        Raises
        ------
        BufferError
            If another device is requested, or the host without a copy of data in CUDA memory.
        TritonModelException
            For strings, or if the device fails.
        """
        if dl_device is not None and tuple(dl_device) != (dlpack.CPU, 0):
            raise BufferError(
                f"expected dl_device to be the host, {(dlpack.CPU, 0)}, got {tuple(dl_device)}"
            )
        return self._export(max_version, bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and id of the data."""
        return (dlpack.CPU, 0)

    def _export(self, max_version: tuple[int, int] | None, copied: bool = False) -> Any:
        owner: object = self
        # export_host() refuses strings: they need not be serialised first.
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
        """Wrap another library's tensor without a copy.

        Parameters
        ----------
        name : str
            Not empty.
        tensor : object
            A DLPack capsule, or an object with ``__dlpack__`` and ``__dlpack_device__``, or with
            ``__cuda_array_interface__``. C-contiguous; in host memory, or in CUDA memory where the
            model's instance has a GPU. Its memory lives as long as this tensor or a view of it. The
            device waits for the work submitted so far to the producer's current stream; for a
            capsule, which names no stream, to the default stream and the current streams of
            PyTorch and CuPy.

        Raises
        ------
        TypeError
            If `name` is not a str.
        TritonModelException
            If the tensor is of a form that is not supported.
        """
        name = text(name, "the tensor's name")
        if not name:
            raise TritonModelException(EMPTY_NAME)
        server = host.current()
        device = None if server is None else server.device
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
        return DeviceTensor._on_device(name, imported.datatype, imported.shape, memory)


class SharedTensor(Tensor):
    """An input that a caller, or another member of an ensemble, uses as well.

    `as_numpy` and DLPack return a copy of it, so that a model that writes to it (``x *= 2``) changes
    only its own data. As a tensor of a response or of a call it is sent uncopied, as received.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_copy", "_own")

    _copy: Callable[[memoryview], memoryview]
    _own: memoryview | None

    def _belongs_to(self, copy: Callable[[memoryview], memoryview]) -> None:
        """Set the function that copies the data when the model reads it."""
        self._own = None
        self._copy = copy

    def as_numpy(self) -> NDArray[Any]:  # noqa: D102
        array = self._array
        if array is None:
            # Decoding strings copies them already.
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
        """Wrap an array in memory that is sent without a copy; `place` identifies it."""
        tensor = object.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = array.shape
        tensor._array = array
        tensor._source = None
        tensor._place = None
        tensor._final = place
        return tensor


class DeviceTensor(OutputTensor):
    """A tensor in CUDA memory: received there, imported from a framework, or made to be filled.

    To models it is a `Tensor`. It is sent without a copy if it has a ``_final``, as other
    `OutputTensor` have, or if its address lies in the arena.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_bytes",)

    _device_bytes: DeviceBytes

    @classmethod
    def _on_device(
        cls,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        data: DeviceBytes,
        place: tuple[int, int, int, int] | None = None,
        final: object = None,
    ) -> DeviceTensor:
        """Wrap exactly the tensor's bytes on the device without checking, copying or waiting.

        `place`, for memory that can be passed by reference, is region, offset, size and lease;
        `final` is the client's target of an output that lies in the client's own memory.
        """
        tensor = object.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = shape
        tensor._source = None
        tensor._array = None
        tensor._place = place
        tensor._final = final
        tensor._device_bytes = data
        return tensor

    @classmethod
    def _empty(cls, form: OutputForm) -> DeviceTensor:
        """Make a tensor in the instance's arena."""
        data = DeviceBytes(0, 0, device_memory().ordinal)
        if form.nbytes:
            try:
                data = device_memory().allocate_device(form.nbytes)
            except BridgeError as error:
                raise TritonModelException(error.message) from None
        return cls._on_device(form.name, form.datatype, form.shape, data)

    def is_cpu(self) -> bool:
        """Return whether the data is in host memory."""
        return False

    @property
    def device(self) -> str:
        """Device of the data, with the number that frameworks use."""
        return f"cuda:{self._device_bytes.ordinal}"

    def as_numpy(self) -> NDArray[Any]:  # noqa: D102
        array = self._array
        # Others may have written to shared memory since the last call.
        if array is None or self._device_bytes.shared:
            array = self._array = self._view(self._payload())
        return array

    def _payload(self) -> memoryview:
        """Return a copy in host memory."""
        return _host_copy(self._device_bytes).data

    def to_dlpack(self) -> Any:  # noqa: D102
        try:
            self._device_bytes.hand_out_unnamed()
        except BridgeError as error:
            raise TritonModelException(error.message) from None
        return self._capsule(self, self._device_bytes, None, copied=False)

    def __dlpack__(
        self,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if not (stream is None or isinstance(stream, int) or hasattr(stream, "__cuda_stream__")):
            raise TypeError(
                "expected stream to be an int, an object with __cuda_stream__, or None, got "
                f"{type(stream).__name__}"
            )
        here = self.__dlpack_device__()
        wanted = here if dl_device is None else tuple(dl_device)
        if wanted == (dlpack.CPU, 0):
            return self._host_capsule(max_version, copy)
        if wanted != here:
            raise BufferError(
                f"expected dl_device to be {here}, where the data is, or the host, "
                f"{(dlpack.CPU, 0)}, got {wanted}"
            )
        owner: object = self
        data = self._device_bytes
        if copy and data.nbytes:
            try:
                owner = data = device_memory().copy_on_device(data)
            except BridgeError as error:
                raise TritonModelException(error.message) from None
        try:
            data.hand_out(stream)
        except BridgeError as error:
            raise TritonModelException(error.message) from None
        return self._capsule(owner, data, max_version, copied=bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and id of the data."""
        return (dlpack.CUDA, self._device_bytes.ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The data for libraries without DLPack; not copied."""
        try:
            return cuda_array.cuda_array_interface(self._device_bytes, self._datatype, self._shape)
        except BridgeError as error:
            # An AttributeError, so that hasattr() is False.
            raise AttributeError(error.message) from None

    def _capsule(
        self,
        owner: object,
        data: DeviceBytes,
        max_version: tuple[int, int] | None,
        *,
        copied: bool,
    ) -> Any:
        return dlpack.make_capsule(
            owner,
            data.pointer,
            self._datatype,
            self._shape,
            (dlpack.CUDA, data.ordinal),
            max_version,
            read_only=data.read_only,
            copied=copied,
        )

    def _host_capsule(self, max_version: tuple[int, int] | None, copy: bool | None) -> Any:
        if copy is not None and not copy:
            raise BufferError(
                f"expected copy to be None or True for data on {self.device} that is wanted on the "
                "host, got False"
            )
        memory = _host_copy(self._device_bytes)
        return dlpack.export_host(
            memory, memory, self._datatype, self._shape, max_version, copied=True
        )


def _host_copy(data: DeviceBytes) -> NDArray[np.uint8]:
    """Return bytes of the device in new host memory, or raise TritonModelException."""
    array = np.empty(data.nbytes, np.uint8)
    if data.nbytes:
        try:
            device_memory().copy_to_host(data, array.data)
        except BridgeError as error:
            raise TritonModelException(error.message) from None
    return array
