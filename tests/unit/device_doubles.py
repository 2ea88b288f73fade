"""Stand-ins for a GPU in tests of tensors: memory of the host in its place."""

import ctypes
import itertools

import numpy as np

from gpubridge.tensor import dlpack_abi, dlpack_ctypes
from gpubridge.tensor.device_bytes import DeviceBytes

#: What a stub's copy stream would be called.
BRIDGE_STREAM = 0x7F0000AA0010
#: A stream of a framework's.
MODEL_STREAM = 0x7F0000BB0020

_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


class Stream:
    """A stream that writes down what is asked of it; the last `failure` is raised instead."""

    def __init__(self, handle=BRIDGE_STREAM):
        self.handle = handle
        self.asked = []
        self.failure = None
        self.idle = False

    def _note(self, *what):
        if self.failure is not None:
            raise self.failure
        self.asked.append(what)

    def order_before(self, stream, /):
        self._note("before", stream)

    def order_after(self, stream, /):
        self._note("after", stream)

    def mark(self, stream=None, /):
        if stream is not None:
            self._note("after", stream)
        return self

    def done(self):
        self._note("done?")
        return self.idle

    def wait(self):
        self._note("wait")


class Memory:
    """Device memory of a stub, as `gpubridge.pb_utils.host.DeviceMemory` says."""

    ordinal = 0

    def __init__(self):
        self.stream = Stream()
        self.copied = {"d2h": 0, "d2d": 0}
        self.failure = None

    def _fail(self):
        if self.failure is not None:
            raise self.failure

    def allocate_device(self, nbytes):
        self._fail()
        owner = Owner(nbytes)
        return DeviceBytes(owner.address, nbytes, self.ordinal, owner)

    def copy_to_host(self, data, target):
        self._fail()
        data.order_into(self.stream)
        self.copied["d2h"] += data.nbytes
        target[:] = ctypes.string_at(data.pointer, data.nbytes)
        self.stream.wait()

    def copy_on_device(self, data):
        copy = self.allocate_device(data.nbytes)
        data.order_into(self.stream)
        self.copied["d2d"] += data.nbytes
        ctypes.memmove(copy.pointer, data.pointer, data.nbytes)
        copy.ready = self.stream
        return copy


class Owner:
    """Bytes at an address, which can be watched."""

    def __init__(self, data):
        self._bytes = np.frombuffer(
            bytearray(max(data, 1) if isinstance(data, int) else data), "u1"
        )
        self.address = self._bytes.ctypes.data

    def bytes(self):
        return self._bytes.tobytes()

    def write(self, data):
        self._bytes[: len(data)] = np.frombuffer(data, np.uint8)


class CudaArray:
    """A framework's tensor on a GPU, which speaks DLPack with streams.

    Parameters
    ----------
    array : numpy.ndarray
        Its contents, C-contiguous; BF16 as uint16 with ``code=4``.
    **fields
        Of the structure that consumers see, where they are to be other than they are: shape (of as
        many dims), strides, code, bits, lanes, byte_offset, device_type, device_id, flags, data.
    """

    def __init__(self, array, versioned=False, **fields):
        self.owner = Owner(array.tobytes())
        self.shape = array.shape
        self._dtype = ({"f": 2, "i": 0, "u": 1, "b": 6}[array.dtype.kind], array.itemsize * 8)
        self._versioned = versioned
        self._fields = fields
        self._strides = None
        self.streams = []

    def __dlpack_device__(self):
        return (self._fields.get("device_type", 2), self._fields.get("device_id", 0))

    def __dlpack__(self, stream=None, max_version=None):
        self.streams.append(stream)
        return self.capsule(max_version is not None and self._versioned)

    def capsule(self, versioned=False):
        fields = self._fields
        capsule = dlpack_ctypes.engine().capsule_make(
            self.owner,
            self.owner.address,
            self.shape,
            self._dtype,
            self.__dlpack_device__(),
            fields.get("flags", 0),
            versioned,
        )
        managed = managed_of(capsule)
        tensor = managed.dl_tensor
        for name in ("code", "bits", "lanes"):
            setattr(tensor.dtype, name, fields.get(name, getattr(tensor.dtype, name)))
        tensor.data = fields.get("data", tensor.data)
        tensor.byte_offset = fields.get("byte_offset", 0)
        # In place: NumPy's deleter frees the block of the shape.
        for axis, dim in enumerate(fields.get("shape", ())):
            tensor.shape[axis] = dim
        if "strides" in fields:
            strides = fields["strides"]
            self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
            tensor.strides = self._strides
        return capsule


class DescribedArray:
    """A library's tensor on a GPU that only has a ``__cuda_array_interface__``."""

    def __init__(self, array, **fields):
        self.owner = Owner(array.tobytes())
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.owner.address, False),
            "strides": None,
            "stream": MODEL_STREAM,
            **fields,
        }


def managed_of(capsule):
    """Give the structure in an unconsumed capsule."""
    name = name_of(capsule)
    layout = dlpack_abi.DLManagedTensor
    if name == b"dltensor_versioned":
        layout = dlpack_abi.DLManagedTensorVersioned
    return layout.from_address(_pointer_of(capsule, name))


def seen_by_consumer(capsule):
    """Give address, device, shape and strides as a consumer finds them."""
    tensor = managed_of(capsule).dl_tensor
    assert tensor.byte_offset == 0
    return (
        tensor.data or 0,
        (tensor.device.device_type, tensor.device.device_id),
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
    )


def strides_of(shape):
    """Give the strides of C order, in elements."""
    reverse = itertools.accumulate(reversed(shape[1:]), lambda left, right: left * right, initial=1)
    return tuple(reversed(list(reverse))) if shape else ()
