"""Tensors whose data is in CUDA memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils.device_memory import device_memory, host_copy
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.output_form import OutputForm
from gpubridge.pb_utils.tensor import OutputTensor
from gpubridge.tensor import cuda_array, dlpack
from gpubridge.tensor.device_bytes import DeviceBytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


class DeviceTensor(OutputTensor):
    """A tensor in CUDA memory: what arrived there, was taken from a framework, or is to be filled.

    Models meet it as a `Tensor`. One that need not be copied to be sent says so as other
    `OutputTensor` do, by its ``_final``; or it lies in the arena, which is looked up by its address.
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
        """Wrap bytes of the device, exactly the tensor: nothing is checked, copied or waited for.

        `place`, for memory that can be handed on, is region, offset, size and lease; `final` is
        where an output is that its client wants just there.
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
        """Tell whether the data is in host memory."""
        return False

    @property
    def device(self) -> str:
        """Device of the data, with the number that frameworks use."""
        return f"cuda:{self._device_bytes.ordinal}"

    def as_numpy(self) -> NDArray[Any]:  # noqa: D102
        array = self._array
        # What others may write to must be looked at each time.
        if array is None or self._device_bytes.shared:
            array = self._array = self._view(self._payload())
        return array

    def _payload(self) -> memoryview:
        """Give a copy in host memory, for what knows no device."""
        return host_copy(self._device_bytes).data

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
        if stream is not None and not isinstance(stream, int):
            raise TypeError(f"expected stream to be an int or None, got {type(stream).__name__}")
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
        """Give DLPack's device type and id of the data."""
        return (dlpack.CUDA, self._device_bytes.ordinal)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The data as libraries see it that know no DLPack; no copy."""
        try:
            return cuda_array.cuda_array_interface(self._device_bytes, self._datatype, self._shape)
        except BridgeError as error:
            # So that hasattr() tells what there is.
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
        memory = host_copy(self._device_bytes)
        return dlpack.export_host(
            memory, memory, self._datatype, self._shape, max_version, copied=True
        )
