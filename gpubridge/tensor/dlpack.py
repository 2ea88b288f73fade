"""DLPack: tensors handed to and taken from frameworks without a copy.

Host memory only for now: CUDA tensors are refused on import. The capsules themselves are made and
read by ``gpubridge._native`` or, without it, by `gpubridge.tensor.dlpack_ctypes`; the rules are
here, once.

Ownership: an exported capsule holds its owner until the consumer lets go or, never consumed, until
the capsule is deleted. An imported tensor's memory holds the producer's tensor; its deleter is
called exactly once, when the last view of that memory is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import dlpack_ctypes
from gpubridge.tensor.dtypes import element_count, item_size
from gpubridge.tensor.native import CapsuleFields, native

if TYPE_CHECKING:
    from gpubridge.tensor.dlpack_ctypes import CapsuleEngine
    from gpubridge.tensor.native import Capsule

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "HostTensor",
    "export_host",
    "import_capsule",
    "import_object",
    "is_capsule",
]

#: ``DLDeviceType`` values.
CPU, CUDA, CUDA_HOST = 1, 2, 3

_READ_ONLY, _COPIED = 1, 2
_BFLOAT = 4
_PROTOCOL = (1, 0)

#: KServe datatype -> (``DLDataTypeCode``, bits)
_DL_DTYPE = {
    "BOOL": (6, 8),
    "INT8": (0, 8),
    "INT16": (0, 16),
    "INT32": (0, 32),
    "INT64": (0, 64),
    "UINT8": (1, 8),
    "UINT16": (1, 16),
    "UINT32": (1, 32),
    "UINT64": (1, 64),
    "FP16": (2, 16),
    "FP32": (2, 32),
    "FP64": (2, 64),
    "BF16": (_BFLOAT, 16),
}
_DATATYPE = {value: name for name, value in _DL_DTYPE.items()}


class HostTensor(NamedTuple):
    """A tensor in host memory that another library owns.

    Attributes
    ----------
    datatype : str
        KServe name.
    shape : tuple of int
        C-contiguous.
    memory : memoryview
        One-dimensional bytes of exactly the tensor; read-only where the producer says so. The
        producer's memory lives until the last view of it is gone.
    """

    datatype: str
    shape: tuple[int, ...]
    memory: memoryview


class _ArrayInterface:
    """Lends foreign memory to NumPy, which keeps this object, and so the memory's owner, alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: object, address: int, nbytes: int, read_only: bool) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, read_only),
        }


def _engine() -> CapsuleEngine:
    return native() or dlpack_ctypes.engine()


def is_capsule(candidate: object) -> bool:
    """Tell whether an object is a ``PyCapsule`` of any name."""
    return type(candidate).__name__ == "PyCapsule"


def export_host(
    owner: object,
    memory: Any,
    datatype: str,
    shape: tuple[int, ...],
    max_version: tuple[int, int] | None = None,
    copied: bool = False,
) -> Capsule:
    """Make a capsule of a C-contiguous tensor in host memory.

    Parameters
    ----------
    owner : object
        What keeps `memory` where it is; the capsule holds exactly one reference to it.
    memory : buffer
        The tensor's bytes.
    datatype, shape
        KServe name and dimensions; `memory` is at least that large.
    max_version : (int, int), optional
        The newest DLPack version that the consumer reads. From 1.0 on the capsule is versioned
        (``"dltensor_versioned"``) and tells a consumer that the memory is read-only; an
        unversioned one cannot say so.
    copied : bool
        Whether `memory` is a copy made for this capsule.

    Raises
    ------
    BridgeError
        UNSUPPORTED for BYTES.
    """
    dtype = _DL_DTYPE.get(datatype)
    if dtype is None:
        raise BridgeError("DLPack does not have support for string tensors.", ErrorCode.UNSUPPORTED)
    view = np.frombuffer(memory, np.uint8) if memoryview(memory).nbytes else np.empty(0, np.uint8)
    address = view.__array_interface__["data"][0]
    read_only = not view.flags.writeable
    flags = (_READ_ONLY if read_only else 0) | (_COPIED if copied else 0)
    versioned = max_version is not None and tuple(max_version) >= _PROTOCOL
    return _engine().capsule_make(owner, address, shape, dtype, (CPU, 0), flags, versioned)


def import_object(producer: Any) -> HostTensor:
    """Take a tensor from an object with ``__dlpack__`` and ``__dlpack_device__``.

    Raises
    ------
    BridgeError
        As `import_capsule`; the device is checked before the producer is asked for a capsule.
    Exception
        Whatever the producer raises (a tensor that requires gradients, say).
    """
    _check_device(int(producer.__dlpack_device__()[0]))
    try:
        capsule = producer.__dlpack__(max_version=_PROTOCOL)
    except TypeError:
        # Producers older than DLPack 1.0 do not know the keyword.
        capsule = producer.__dlpack__()
    return import_capsule(capsule)


def import_capsule(capsule: Capsule) -> HostTensor:
    """Take the tensor of a capsule; the capsule is consumed unless an error is raised.

    Raises
    ------
    BridgeError
        INVALID_ARG for a capsule that is no DLPack tensor, was consumed before, or is of a newer
        major version; UNSUPPORTED for a device, dtype or layout that cannot be served.
    """
    engine = _engine()
    try:
        fields = CapsuleFields(*engine.capsule_read(capsule))
    except ValueError as error:
        raise BridgeError(str(error), ErrorCode.INVALID_ARG) from None
    _check_device(fields.device_type)
    datatype = _checked_datatype(fields)
    _check_contiguous(fields)
    owner = engine.capsule_take(capsule)
    nbytes = element_count(fields.shape) * cast("int", item_size(datatype))
    if nbytes == 0:
        return HostTensor(datatype, fields.shape, memoryview(b""))
    address = fields.address + fields.byte_offset
    read_only = bool(fields.flags & _READ_ONLY)
    lent = _ArrayInterface(owner, address, nbytes, read_only)
    return HostTensor(datatype, fields.shape, np.asarray(lent).data)


def _check_device(device_type: int) -> None:
    if device_type in (CPU, CUDA_HOST):
        return
    if device_type == CUDA:
        raise BridgeError(
            "expected a DLPack tensor in host memory, got one in CUDA memory, which this version "
            "of gpubridge cannot take yet; pass tensor.cpu() (or the framework's equivalent)",
            ErrorCode.UNSUPPORTED,
        )
    raise BridgeError(
        f"DLDevice type {device_type} is not support by Python backend.",
        ErrorCode.UNSUPPORTED,
    )


def _checked_datatype(fields: CapsuleFields) -> str:
    if fields.code == _BFLOAT and fields.bits != 16:
        raise BridgeError(
            f"Expected BF16 tensor to have 16 bits, but had: {fields.bits}",
            ErrorCode.UNSUPPORTED,
        )
    datatype = _DATATYPE.get((fields.code, fields.bits)) if fields.lanes == 1 else None
    if datatype is None:
        raise BridgeError(
            f"expected a DLPack dtype of {', '.join(_DL_DTYPE)} with one lane, got type code "
            f"{fields.code} with {fields.bits} bits and {fields.lanes} lanes",
            ErrorCode.UNSUPPORTED,
        )
    return datatype


def _check_contiguous(fields: CapsuleFields) -> None:
    if element_count(fields.shape) == 0 or fields.strides is None:
        return
    expected = 1
    for dim, stride in zip(reversed(fields.shape), reversed(fields.strides)):
        # The stride of a dimension of one element leads nowhere; producers put anything there.
        if dim != 1 and stride != expected:
            raise BridgeError(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored "
                "in C-Order are supported.",
                ErrorCode.UNSUPPORTED,
            )
        expected *= dim
