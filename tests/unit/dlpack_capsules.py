"""DLPack capsules for tests: of memory that can be watched, and of a foreign producer."""

import ctypes

import numpy as np

from gpubridge.tensor import dlpack, dlpack_abi
from gpubridge.tensor.datatypes import DATATYPES

__all__ = ["Owner", "Producer", "exported", "name_of"]

name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


class Owner(bytearray):
    """Memory that can be watched."""


def exported(datatype="FP32", shape=(2, 3), version=None, **keywords):
    """Export some memory; returns it and the capsule."""
    nbytes = int(np.prod(shape)) * DATATYPES[datatype].item_size
    owner = Owner(bytes(i % 2 for i in range(nbytes)))
    return owner, dlpack.export_host(owner, owner, datatype, shape, version, **keywords)


class Producer:
    """A hand-made foreign tensor whose deleter counts its calls."""

    def __init__(self, array, versioned=False, **fields):
        self.array, self.deleted = array, 0
        layout = dlpack_abi.DLManagedTensorVersioned if versioned else dlpack_abi.DLManagedTensor
        self.managed = managed = layout()
        tensor = managed.dl_tensor
        tensor.data = array.ctypes.data
        tensor.device.device_type = fields.get("device", 1)
        tensor.ndim = array.ndim
        tensor.dtype.code = fields.get("code", {"f": 2, "i": 0, "u": 1, "b": 6}[array.dtype.kind])
        tensor.dtype.bits = fields.get("bits", array.itemsize * 8)
        tensor.dtype.lanes = fields.get("lanes", 1)
        self.shape = (ctypes.c_int64 * array.ndim)(*fields.get("shape", array.shape))
        tensor.shape = self.shape
        strides = fields.get("strides", [stride // array.itemsize for stride in array.strides])
        if strides is not None:
            self.strides = (ctypes.c_int64 * array.ndim)(*strides)
            tensor.strides = self.strides
        tensor.byte_offset = fields.get("byte_offset", 0)
        if versioned:
            managed.version.major, managed.version.minor = fields.get("version", (1, 0))
            managed.flags = fields.get("flags", 0)
        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        if fields.get("deleter", True):
            managed.deleter = ctypes.cast(self.callback, ctypes.c_void_p).value
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        make = ctypes.PYFUNCTYPE(
            ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        )(("PyCapsule_New", ctypes.pythonapi))
        self.capsule = make(ctypes.addressof(managed), self.name, None)

    def _delete(self, _address):
        self.deleted += 1
