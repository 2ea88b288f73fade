"""Import and export of CUDA tensors by ``__cuda_array_interface__``."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpubridge.errors import BridgeError, invalid, unsupported
from gpubridge.tensor import dlpack
from gpubridge.tensor.datatypes import byte_size, element_count
from gpubridge.tensor.device_bytes import DeviceBytes, OrderingStream, Ready
from gpubridge.tensor.dtypes import DTYPE_OF_DATATYPE, datatype_from_numpy
from gpubridge.tensor.streams import LEGACY_STREAM, current_stream_of


def cuda_array_interface(
    data: DeviceBytes, datatype: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Describe a tensor as ``__cuda_array_interface__``, version 3, and order its use.

    The consumer waits for the legacy default stream, which waits for the data. Raises BridgeError:
    UNSUPPORTED for BF16, for which the interface has no name.
    """
    dtype = DTYPE_OF_DATATYPE.get(datatype)
    if dtype is None:
        raise unsupported(
            f"__cuda_array_interface__ has no name for the elements of {datatype} tensors: use DLPack"
        )
    ordered = data.ready is not None
    data.hand_out(None)
    return {
        "version": 3,
        "shape": shape,
        "typestr": dtype.str,
        "data": (data.pointer if element_count(shape) else 0, data.read_only),
        "strides": None,
        "stream": LEGACY_STREAM if ordered else None,
    }


def import_cuda_array(
    producer: Any, stream: OrderingStream | None, ordinal: int
) -> dlpack.ImportedTensor:
    """Import a tensor that an object describes in its ``__cuda_array_interface__``.

    Users of the tensor wait for the stream that the interface names. ``stream`` is of device
    ``ordinal``; None where this process has no device.

    Raises BridgeError: INVALID_ARG for an interface that does not follow its rules; UNSUPPORTED for
    a dtype, layout or mask that cannot be served, or without a device.
    """
    dlpack.check_device(dlpack.CUDA, stream)
    assert stream is not None  # that was checked
    pointer, read_only, datatype, shape, named = _read(producer.__cuda_array_interface__)
    nbytes = byte_size(datatype, shape)
    dlpack.check_address(pointer, nbytes)
    if nbytes == 0:
        return dlpack.ImportedTensor(datatype, shape, DeviceBytes(0, 0, ordinal))
    ready: Ready | None = None if named is None else stream.mark(named)
    data = DeviceBytes(pointer, nbytes, ordinal, producer, ready, read_only=read_only, shared=True)
    used = current_stream_of(producer, ordinal)
    # The producer, which is kept, keeps the stream that it names.
    data.owner_streams = {used.handle: [used.owner], LEGACY_STREAM if named is None else named: []}
    return dlpack.ImportedTensor(datatype, shape, data)


def _read(interface: dict[str, Any]) -> tuple[int, bool, str, tuple[int, ...], int | None]:
    """Check an interface; returns address, read-only flag, datatype, shape and stream."""
    try:
        shape = tuple([int(dim) for dim in interface["shape"]])
        dtype = np.dtype(interface["typestr"])
        pointer, read_only = interface["data"]
        address = int(pointer or 0)
        stream = interface.get("stream") if int(interface["version"]) >= 3 else LEGACY_STREAM
        strides = _in_elements(interface.get("strides"), dtype.itemsize)
        element_count(shape)
    except (KeyError, TypeError, ValueError, BridgeError) as error:
        raise invalid(
            "expected a __cuda_array_interface__ with shape, typestr, data and version, got "
            f"{interface!r} ({type(error).__name__}: {error})"
        ) from None
    if stream is not None and (not isinstance(stream, int) or stream < 0):
        raise invalid(
            "expected the stream of a __cuda_array_interface__ to be None, 1, 2 or a CUDA "
            f"stream's handle, got {stream!r}"
        )
    datatype = datatype_from_numpy(dtype)
    if datatype is None or datatype == "BYTES":
        raise unsupported(
            "expected a __cuda_array_interface__ with a dtype that Triton has, got typestr "
            f"{interface['typestr']!r}"
        )
    if interface.get("mask") is not None:
        raise unsupported(
            "expected a __cuda_array_interface__ without a mask, got one with: fill the masked "
            "elements first"
        )
    dlpack.check_contiguous(shape, strides)
    # 0 is forbidden as ambiguous between two streams; the legacy stream is ordered with both.
    return address, bool(read_only), datatype, shape, LEGACY_STREAM if stream == 0 else stream


def _in_elements(strides: Any, itemsize: int) -> list[int] | None:
    if strides is None:
        return None
    # A contiguous array has only strides of whole elements.
    return [stride // itemsize if stride % itemsize == 0 else -1 for stride in strides]
