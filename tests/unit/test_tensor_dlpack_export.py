"""DLPack capsules that we make, with the compiled module and without; NumPy and torch take them."""

import ctypes
import sys
import threading
import weakref

import numpy as np
import pytest

from gpubridge.tensor import dlpack, dlpack_abi, dlpack_ctypes, native
from gpubridge.tensor.datatypes import DATATYPES
from tests.unit.dlpack_capsules import Owner, exported, name_of

NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
#: NumPy makes and reads versioned capsules from here on.
NUMPY_VERSIONED = NUMPY >= (2, 1)

#: CPython keeps the pointer that PyCapsule_SetName is given.
USED_NAME = b"used_dltensor"

pytestmark = pytest.mark.usefixtures("dlpack_engine")


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("datatype", [*NUMERIC, "BF16"])
def test_export_and_import_of_every_datatype(datatype, version):
    owner, capsule = exported(datatype, (2, 3), version)
    tensor = dlpack.import_capsule(capsule)
    assert tensor.datatype == datatype
    assert tensor.shape == (2, 3)
    assert tensor.memory.tobytes() == bytes(owner)
    owner[0] = 0x40
    assert tensor.memory[0] == 0x40


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 1, 3)])
def test_shapes(shape):
    _, capsule = exported("INT16", shape)
    assert dlpack.import_capsule(capsule).shape == shape


def test_capsule_names_follow_the_version_asked_for(dlpack_engine):
    assert name_of(exported()[1]) == b"dltensor"
    assert name_of(exported(version=(0, 8))[1]) == b"dltensor"
    versioned = name_of(exported(version=(1, 3))[1])
    if dlpack_engine == "native" or NUMPY_VERSIONED:
        assert versioned == b"dltensor_versioned"
    else:
        assert versioned == b"dltensor"


def test_a_capsule_that_nobody_consumes_frees_its_owner():
    for version in (None, (1, 0)):
        owner, capsule = exported(version=version)
        dead = weakref.ref(owner)
        held = sys.getrefcount(owner)
        del capsule
        assert sys.getrefcount(owner) == held - 1
        del owner
        assert dead() is None


def test_the_capsule_holds_exactly_one_reference_to_its_owner():
    owner = Owner(24)
    before = sys.getrefcount(owner)
    capsule = dlpack.export_host(owner, bytearray(24), "FP32", (2, 3))
    assert sys.getrefcount(owner) == before + 1
    tensor = dlpack.import_capsule(capsule)
    del capsule
    assert sys.getrefcount(owner) == before + 1
    del tensor
    assert sys.getrefcount(owner) == before


def test_flags_tell_read_only_and_copied(dlpack_engine):
    memory = bytes(24)
    capsule = dlpack.export_host(memory, memory, "FP32", (2, 3), (1, 0), copied=True)
    if name_of(capsule) == b"dltensor":
        pytest.skip("this NumPy makes unversioned capsules only, which have no flags")
    flags = dlpack_ctypes.engine().capsule_read(capsule)[-1]
    assert flags == 3
    assert dlpack.import_capsule(capsule).memory.readonly


def test_unversioned_read_only_memory_is_exported_all_the_same():
    memory = bytes(24)
    assert dlpack.import_capsule(dlpack.export_host(memory, memory, "FP32", (2, 3))).shape == (2, 3)


def test_fields_of_an_exported_capsule():
    owner, capsule = exported("BOOL", (4, 2, 5), (1, 0))
    address = np.frombuffer(owner, np.uint8).ctypes.data
    fields = native.CapsuleFields(*dlpack_ctypes.engine().capsule_read(capsule))
    assert fields.address == address
    assert (fields.device_type, fields.device_id) == (1, 0)
    assert (fields.code, fields.bits, fields.lanes) == (6, 8, 1)
    assert fields.shape == (4, 2, 5)
    assert fields.strides in ((10, 5, 1), None)
    assert fields.byte_offset == 0


def test_a_consumer_may_let_go_without_the_gil():
    class Watched(Owner):
        def __del__(self):
            deleted.append(sum(self))

    deleted = []
    owner = Watched(b"\1" * 8)
    capsule = dlpack.export_host(owner, owner, "INT8", (8,))
    managed = dlpack_abi.DLManagedTensor.from_address(
        ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )(capsule, b"dltensor")
    )
    del owner
    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_SetName", ctypes.pythonapi)
    )(capsule, USED_NAME)
    # ctypes lets go of the GIL around a CFUNCTYPE call.
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
    assert deleted == [8]


def test_a_consumer_may_let_go_in_another_thread():
    torch = pytest.importorskip("torch")
    owner = Owner(24)
    dead = weakref.ref(owner)
    held = [torch.utils.dlpack.from_dlpack(dlpack.export_host(owner, owner, "FP32", (6,)))]
    del owner
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert dead() is None
