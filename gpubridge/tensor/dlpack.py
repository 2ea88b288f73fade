"""DLPack: export to and import from frameworks without a copy.

``gpubridge._native`` or, without it, `gpubridge.tensor.dlpack_ctypes` makes and reads the capsules;
this module has the rules. Tensors in CUDA memory are imported only where there is a stream to order
them on; `gpubridge.pb_utils.tensor` exports them.

Ownership: an exported capsule keeps its owner until the consumer releases it or, never consumed,
until the capsule is deleted. An imported tensor's memory keeps the producer's tensor, whose deleter
is called exactly once, with the last view of that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gpubridge.errors import invalid, unsupported
from gpubridge.tensor import dlpack_ctypes
from gpubridge.tensor.datatypes import element_count, item_size
from gpubridge.tensor.device_bytes import DeviceBytes, OrderingStream, Ready, ReadyTogether
from gpubridge.tensor.native import CapsuleFields, native
from gpubridge.tensor.streams import UsedStreams, current_stream_of, remember_unnamed

if TYPE_CHECKING:
    from gpubridge.tensor.native import Capsule, CapsuleEngine


#: ``DLDeviceType`` values.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_HOST = (CPU, CUDA_HOST)
#: Managed memory is treated as the device's own.
_DEVICE = (CUDA, CUDA_MANAGED)
_READ_ONLY, _COPIED = 1, 2
_BFLOAT = 4
#: Limit of addresses, which NumPy has, too.
_ADDRESSES = 1 << 63
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

#: ``DLDataTypeCode`` values of types for which Triton has no datatype.
_FOREIGN = {
    3: "an opaque handle",
    5: "a complex number",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}


class ImportedTensor(NamedTuple):
    """A C-contiguous tensor that another library owns.

    ``memory``: exactly its bytes, read-only if the producer's are; it lives until its last view is
    deleted.
    """

    datatype: str
    shape: tuple[int, ...]
    memory: memoryview | DeviceBytes


def _engine() -> CapsuleEngine:
    return native() or dlpack_ctypes.engine()


def is_capsule(candidate: object) -> bool:
    """Return whether an object is a ``PyCapsule`` of any name."""
    return type(candidate).__name__ == "PyCapsule"


def export_host(
    owner: object,
    memory: Any,
    datatype: str,
    shape: tuple[int, ...],
    max_version: tuple[int, int] | None = None,
    copied: bool = False,
) -> Capsule:
    """Make a capsule of a C-contiguous tensor in host memory; UNSUPPORTED for BYTES.

    - ``owner``: object that keeps `memory`; the capsule has exactly one reference to it.
    - ``max_version``: the newest DLPack version that the consumer supports. From 1.0 on the capsule
      is versioned (``"dltensor_versioned"``) and can mark the memory as read-only.
    - ``copied``: whether `memory` is a copy made for this capsule.
    """
    view = np.frombuffer(memory, np.uint8) if memoryview(memory).nbytes else np.empty(0, np.uint8)
    return make_capsule(
        owner,
        view.__array_interface__["data"][0],
        datatype,
        shape,
        (CPU, 0),
        max_version,
        read_only=not view.flags.writeable,
        copied=copied,
    )


def make_capsule(  # noqa: PLR0913  (the fields of DLPack's struct)
    owner: object,
    address: int,
    datatype: str,
    shape: tuple[int, ...],
    device: tuple[int, int],
    max_version: tuple[int, int] | None,
    *,
    read_only: bool,
    copied: bool,
) -> Capsule:
    """Make a capsule of C-contiguous elements at an address of any device; UNSUPPORTED: BYTES."""
    dtype = _DL_DTYPE.get(datatype)
    if dtype is None:
        raise unsupported("DLPack does not have support for string tensors.")
    flags = (_READ_ONLY if read_only else 0) | (_COPIED if copied else 0)
    versioned = max_version is not None and tuple(max_version) >= _PROTOCOL
    return _engine().capsule_make(owner, address, shape, dtype, device, flags, versioned)


def import_object(
    producer: Any, stream: OrderingStream | None = None, ordinal: int = 0
) -> ImportedTensor:
    """Import a tensor of an object with ``__dlpack__`` and ``__dlpack_device__``.

    CUDA memory of PyTorch or CuPy on device ``ordinal`` is complete after the work submitted so far to
    their current stream; any other producer must make ``stream``, of that device, wait for it. None
    where this process has no device. Raises as `import_capsule`, or as the producer.
    """
    if hasattr(producer, "resolve_neg"):
        # PyTorch exports the bytes of a tensor that is negated when it is read, such as `x.conj().imag`.
        producer = producer.resolve_neg()
    device_type, device = map(int, producer.__dlpack_device__())
    check_device(device_type, stream)
    if device_type in _HOST or stream is None:
        try:
            capsule = producer.__dlpack__(max_version=_PROTOCOL)
        except TypeError:
            # Producers older than DLPack 1.0 do not know the keyword.
            capsule = producer.__dlpack__()
        return import_capsule(capsule, stream, ordinal)
    used = current_stream_of(producer, device)
    known = used.owner is not None and device == ordinal
    asked = -1 if known else stream.handle
    try:
        capsule = producer.__dlpack__(stream=asked, max_version=_PROTOCOL)
    except TypeError:
        try:
            capsule = producer.__dlpack__(stream=asked)
        except TypeError:
            # It supports no streams: its capsule is ordered like one without its producer.
            return import_capsule(producer.__dlpack__(), stream, ordinal)
    imported = _imported(capsule, stream, None)
    data = imported.memory
    if isinstance(data, DeviceBytes) and data.nbytes:
        data.ready = stream.mark(used.handle if known else None)
        data.owner_streams = {used.handle: [used.owner]}
    return imported


def import_capsule(
    capsule: Capsule, stream: OrderingStream | None = None, ordinal: int = 0
) -> ImportedTensor:
    """Import the tensor of a capsule, which is consumed unless an error is raised.

    CUDA memory is complete with what is by now on its device's legacy default stream and the current
    streams of known frameworks, since a capsule names none; a capsule of another device than
    ``ordinal``, which ``stream`` is of, cannot be ordered, and is refused.

    Raises BridgeError: INVALID_ARG for a capsule that is not a DLPack tensor, was consumed before, or
    is of a newer major version; UNSUPPORTED for an unsupported device, dtype or layout.
    """
    return _imported(capsule, stream, ordinal)


def _imported(
    capsule: Capsule, stream: OrderingStream | None, unordered_on: int | None
) -> ImportedTensor:
    engine = _engine()
    try:
        fields = CapsuleFields(*engine.capsule_read(capsule))
    except ValueError as error:
        raise invalid(str(error)) from None
    check_device(fields.device_type, stream)
    datatype = _checked_datatype(fields)
    check_contiguous(fields.shape, fields.strides)
    nbytes = element_count(fields.shape) * cast("int", item_size(datatype))
    check_address(fields.address, nbytes, fields.byte_offset)
    on_device = fields.device_type in _DEVICE
    streams: UsedStreams = {}
    ready: Ready | None = None
    if on_device and nbytes and stream is not None and unordered_on is not None:
        if fields.device_id != unordered_on:
            raise unsupported(
                f"expected a DLPack capsule on cuda:{unordered_on}, where the model's instance is, "
                f"got one on cuda:{fields.device_id}; pass the tensor itself, which can say when "
                "its data is complete"
            )
        remember_unnamed(streams, unordered_on)
        marks = [stream.mark(used) for used in streams]
        ready = marks[0] if len(marks) == 1 else ReadyTogether(marks)
    owner = engine.capsule_take(capsule)
    address = fields.address + fields.byte_offset
    read_only = bool(fields.flags & _READ_ONLY)
    memory: memoryview | DeviceBytes
    if on_device:
        memory = DeviceBytes(0, 0, fields.device_id)
        if nbytes:
            memory = DeviceBytes(
                address, nbytes, fields.device_id, owner, ready, read_only=read_only, shared=True
            )
            memory.owner_streams = streams
    else:
        memory = memoryview(b"")
        if nbytes:
            lent = dlpack_ctypes.ArrayInterface(owner, address, (nbytes,), 1, read_only)
            memory = np.asarray(lent).data
    return ImportedTensor(datatype, fields.shape, memory)


def is_on_device(tensor: Any) -> bool:
    """Return whether a capsule, or an importable object, is in CUDA memory."""
    if is_capsule(tensor):
        try:
            return CapsuleFields(*_engine().capsule_read(tensor)).device_type in _DEVICE
        except ValueError:
            return False
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return int(tensor.__dlpack_device__()[0]) in _DEVICE
    return hasattr(tensor, "__cuda_array_interface__")


def check_device(device_type: int, stream: OrderingStream | None) -> None:
    """Raise UNSUPPORTED for a device type that cannot be imported: CUDA needs a stream."""
    if device_type in _HOST or (device_type in _DEVICE and stream is not None):
        return
    if device_type in _DEVICE:
        raise unsupported(
            "expected a tensor in host memory, got one in CUDA memory where the model's instance "
            "has no GPU; give the model an instance_group of KIND_GPU, or pass tensor.cpu() (or "
            "the framework's equivalent)"
        )
    raise unsupported(f"DLDevice type {device_type} is not support by Python backend.")


def _checked_datatype(fields: CapsuleFields) -> str:
    if fields.code == _BFLOAT and fields.bits != 16:
        raise unsupported(f"Expected BF16 tensor to have 16 bits, but had: {fields.bits}")
    datatype = _DATATYPE.get((fields.code, fields.bits)) if fields.lanes == 1 else None
    if datatype is None:
        foreign = _FOREIGN.get(fields.code)
        hint = f": Triton has no datatype for {foreign}; pass a view as integers" if foreign else ""
        raise unsupported(
            f"expected a DLPack dtype of {', '.join(_DL_DTYPE)} with one lane, got type code "
            f"{fields.code} with {fields.bits} bits and {fields.lanes} lanes{hint}"
        )
    return datatype


def check_contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> None:
    """Raise UNSUPPORTED, in Triton's words, unless strides (in elements) are those of C order."""
    if strides is None or element_count(shape) == 0:
        return
    expected = 1
    for dim, stride in zip(reversed(shape), reversed(strides)):
        # The stride of a dimension of one element is unused and may have any value.
        if dim != 1 and stride != expected:
            raise unsupported(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored "
                "in C-Order are supported."
            )
        expected *= dim


def check_address(address: int, nbytes: int, offset: int = 0) -> None:
    """Raise INVALID_ARG for a null address or a range beyond all addresses."""
    if nbytes and (not address or address + offset + nbytes > _ADDRESSES):
        place = f"{address:#x} + {offset}" if address else "none"
        raise invalid(f"expected a tensor of {nbytes} bytes to have an address, got {place}")
