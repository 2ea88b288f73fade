"""CuPy for the simulated driver: as much of it as the examples use.

Arrays lie in memory of the simulated device; an elementwise kernel's own source is compiled for the
host and runs as work of the current stream, on copies, since nobody but the driver sees that memory.
"""

import numpy as np
from cuda.bindings import driver

from cupy import cuda
from cupy.cuda import ok
from cupy.elementwise import ElementwiseKernel
from gpubridge.tensor import dlpack, dlpack_ctypes

__all__ = ["ElementwiseKernel", "asarray", "cuda", "empty", "float32", "from_dlpack", "ndarray"]

float32, uint8 = np.float32, np.uint8
_CUDA = 2
_DTYPES = {(2, 32): np.float32, (1, 8): np.uint8}
_NAMES = {"float32": "FP32", "uint8": "UINT8"}
_POISON = 0xA5


class ndarray:  # noqa: N801  (CuPy's name)
    """A view of device memory."""

    def __init__(self, shape, dtype, memptr, strides=None):
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memptr
        self.strides = np.empty(shape, dtype).strides if strides is None else tuple(strides)

    def __getitem__(self, index):
        assert 0 <= index < self.shape[0]
        start = self.data.moved(index * self.strides[0])
        return ndarray(self.shape[1:], self.dtype, start, self.strides[1:])

    def __iter__(self):
        return (self[index] for index in range(self.shape[0]))

    def __add__(self, other):
        return _ADD(self, other)

    def __sub__(self, other):
        return _SUBTRACT(self, other)

    def transpose(self, *axes):
        moved = ([values[axis] for axis in axes] for values in (self.shape, self.strides))
        shape, strides = moved
        return ndarray(shape, self.dtype, self.data, strides)

    @property
    def span(self):
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((dim - 1) * step for dim, step in zip(self.shape, self.strides, strict=True))
        return last + self.dtype.itemsize

    def __dlpack_device__(self):
        return _CUDA, self.data.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream != -1:
            cuda.order(cuda.get_current_stream().ptr, 1 if stream is None else stream)
        return dlpack.make_capsule(
            self, self.data.ptr, _NAMES[self.dtype.name], self.shape, self.__dlpack_device__(),
            max_version, read_only=False, copied=False,
        )  # fmt: skip


def empty(shape, dtype):
    """Make an array of poison."""
    array = ndarray(shape, dtype, cuda.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize))
    if array.span:
        stream = cuda.get_current_stream().ptr
        ok(driver.cuMemsetD8Async(array.data.ptr, _POISON, array.span, stream))
    return array


def asarray(values):
    """Copy a NumPy array to the current device."""
    values = np.ascontiguousarray(values)
    array = empty(values.shape, values.dtype)
    stream = cuda.get_current_stream()
    ok(driver.cuMemcpyHtoDAsync(array.data.ptr, values, values.nbytes, stream.ptr))
    # Of pageable memory the driver takes a copy before it returns.
    stream.synchronize()
    return array


def from_dlpack(array):
    """Take a tensor, or a bare capsule as CuPy does for compatibility."""
    capsule = array
    if hasattr(array, "__dlpack_device__"):
        stream = cuda.get_current_stream().ptr or 1
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0), copy=None)
    engine = dlpack_ctypes.engine()
    fields = dlpack.CapsuleFields(*engine.capsule_read(capsule))
    assert fields.device_type == _CUDA
    dtype = np.dtype(_DTYPES[fields.code, fields.bits])
    strides = fields.strides and [step * dtype.itemsize for step in fields.strides]
    owner = engine.capsule_take(capsule)
    memory = cuda.UnownedMemory(fields.address + fields.byte_offset, 0, owner, fields.device_id)
    return ndarray(fields.shape, dtype, cuda.MemoryPointer(memory, 0), strides)


_ADD = ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x + y", "add")
_SUBTRACT = ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x - y", "subtract")
