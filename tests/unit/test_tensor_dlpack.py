"""DLPack: one behaviour, with the compiled module and without; NumPy and torch as peers."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref

import numpy as np
import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import dlpack, dlpack_abi, dlpack_ctypes, native
from gpubridge.tensor.dtypes import DATATYPES

NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
#: NumPy makes and reads versioned capsules from here on.
NUMPY_VERSIONED = NUMPY >= (2, 1)

#: CPython keeps the pointer that PyCapsule_SetName is given.
USED_NAME = b"used_dltensor"

_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(dlpack, "native", lambda: None)
    elif native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    return request.param


class Owner(bytearray):
    """Memory that can be watched."""


def exported(datatype="FP32", shape=(2, 3), version=None, **keywords):
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


def test_strings_have_no_dlpack():
    with pytest.raises(BridgeError) as caught:
        dlpack.export_host(b"", b"", "BYTES", (0,))
    assert caught.value.message == "DLPack does not have support for string tensors."


def test_capsule_names_follow_the_version_asked_for(implementation):
    assert _name_of(exported()[1]) == b"dltensor"
    assert _name_of(exported(version=(0, 8))[1]) == b"dltensor"
    versioned = _name_of(exported(version=(1, 3))[1])
    if implementation == "native" or NUMPY_VERSIONED:
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


def test_flags_tell_read_only_and_copied(implementation):
    memory = bytes(24)
    capsule = dlpack.export_host(memory, memory, "FP32", (2, 3), (1, 0), copied=True)
    if _name_of(capsule) == b"dltensor":
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


@pytest.mark.skipif(NUMPY < (1, 23), reason="this NumPy has no from_dlpack")
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_numpy_reads_what_we_export(version):
    if version and not NUMPY_VERSIONED:
        pytest.skip("this NumPy reads unversioned capsules only")

    class Exporter:
        owner = Owner(np.arange(6, dtype=np.float32).tobytes())

        def __dlpack__(self, **_):
            return dlpack.export_host(self.owner, self.owner, "FP32", (2, 3), version)

        def __dlpack_device__(self):
            return (1, 0)

    array = np.from_dlpack(Exporter())
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torch_reads_what_we_export_and_frees_it():
    torch = pytest.importorskip("torch")
    owner = Owner(np.arange(6, dtype=np.float32).tobytes())
    dead = weakref.ref(owner)
    tensor = torch.utils.dlpack.from_dlpack(dlpack.export_host(owner, owner, "FP32", (2, 3)))
    del owner
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dead() is not None
    del tensor
    gc.collect()
    assert dead() is None


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


# Import


def test_import_is_a_view_and_deletes_once_with_the_last_view():
    producer = Producer(np.arange(6, dtype=np.int64).reshape(2, 3))
    tensor = dlpack.import_capsule(producer.capsule)
    assert _name_of(producer.capsule) == b"used_dltensor"
    array = np.frombuffer(tensor.memory, np.int64)
    producer.array[1, 2] = 77
    assert array[5] == 77
    del tensor
    gc.collect()
    assert producer.deleted == 0
    del array
    assert producer.deleted == 1
    producer.capsule = None
    assert producer.deleted == 1


def test_versioned_import_honours_read_only():
    for flags, readonly in ((0, False), (1, True)):
        producer = Producer(np.zeros(4, np.float32), versioned=True, flags=flags)
        tensor = dlpack.import_capsule(producer.capsule)
        assert tensor.memory.readonly is readonly
        assert _name_of(producer.capsule) == b"used_dltensor_versioned"
        del tensor
        assert producer.deleted == 1


def test_a_consumed_capsule_is_refused():
    producer = Producer(np.zeros(4, np.float32))
    dlpack.import_capsule(producer.capsule)
    with pytest.raises(BridgeError, match="nobody has consumed yet") as caught:
        dlpack.import_capsule(producer.capsule)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert producer.deleted == 1


def test_a_capsule_of_something_else_is_refused():
    import datetime

    capsule = datetime.datetime_CAPI if hasattr(datetime, "datetime_CAPI") else None
    if capsule is None:
        pytest.skip("this interpreter does not show a foreign capsule")
    with pytest.raises(BridgeError, match="expected a DLPack capsule"):
        dlpack.import_capsule(capsule)


def test_a_newer_major_version_is_refused_and_left_alone():
    producer = Producer(np.zeros(4, np.float32), versioned=True, version=(2, 0))
    with pytest.raises(BridgeError, match="version 1, got version 2"):
        dlpack.import_capsule(producer.capsule)
    assert _name_of(producer.capsule) == b"dltensor_versioned"
    assert producer.deleted == 0


def test_byte_offset_and_null_strides():
    array = np.arange(8, dtype=np.uint16)
    producer = Producer(array, byte_offset=6, shape=(4,), strides=None)
    tensor = dlpack.import_capsule(producer.capsule)
    assert np.frombuffer(tensor.memory, np.uint16).tolist() == [3, 4, 5, 6]


def test_strides_of_dimensions_of_one_element_do_not_matter():
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 1, 3)
    producer = Producer(array, strides=(-99, 3, 12345, 1))
    assert dlpack.import_capsule(producer.capsule).shape == (1, 2, 1, 3)


def test_strides_of_an_empty_tensor_do_not_matter():
    producer = Producer(np.zeros((0, 2), np.float32), strides=(7, 7))
    assert dlpack.import_capsule(producer.capsule).shape == (0, 2)
    assert producer.deleted == 1


@pytest.mark.parametrize("strides", [(1, 2), (4, 1), (3, 2), (-3, 1), (0, 0)])
def test_other_strides_are_not_contiguous(strides):
    producer = Producer(np.zeros((2, 3), np.float32), strides=strides)
    with pytest.raises(BridgeError) as caught:
        dlpack.import_capsule(producer.capsule)
    assert caught.value.message == (
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
        "C-Order are supported."
    )
    assert _name_of(producer.capsule) == b"dltensor"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lanes": 2}, "with one lane, got .* 2 lanes"),
        ({"bits": 8}, "type code 2 with 8 bits"),
        ({"code": 5}, "type code 5"),
        ({"code": 4, "bits": 32}, "^Expected BF16 tensor to have 16 bits, but had: 32$"),
        ({"device": 10}, "^DLDevice type 10 is not support by Python backend.$"),
        ({"device": 2}, "got one in CUDA memory"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_not_consumed(fields, text):
    producer = Producer(np.zeros(4, np.float32), **fields)
    with pytest.raises(BridgeError, match=text) as caught:
        dlpack.import_capsule(producer.capsule)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert _name_of(producer.capsule) == b"dltensor"
    assert producer.deleted == 0


def test_pinned_host_memory_is_host_memory():
    producer = Producer(np.ones(4, np.float32), device=3)
    assert dlpack.import_capsule(producer.capsule).shape == (4,)


def test_a_producer_without_a_deleter():
    producer = Producer(np.ones(4, np.float32), deleter=False)
    tensor = dlpack.import_capsule(producer.capsule)
    assert np.frombuffer(tensor.memory, np.float32).sum() == 4


def test_objects_are_asked_with_and_without_the_version_keyword():
    class Old:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    array = np.arange(6, dtype=np.int32)
    for producer in (array, Old(array)):
        tensor = dlpack.import_object(producer)
        assert tensor.datatype == "INT32"
        assert np.shares_memory(np.frombuffer(tensor.memory, np.int32), array)


def test_the_device_is_checked_before_a_capsule_is_asked_for():
    class Cuda:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_):
            raise AssertionError("asked for a capsule")

    with pytest.raises(BridgeError, match="CUDA memory"):
        dlpack.import_object(Cuda())


@pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16"])
def test_torch_tensors_come_in_without_a_copy(name):
    torch = pytest.importorskip("torch")
    source = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, name))
    tensor = dlpack.import_object(source)
    assert tensor.shape == (2, 3)
    assert np.frombuffer(tensor.memory, np.uint8).ctypes.data == source.data_ptr()
    capsule = dlpack.import_capsule(torch.utils.dlpack.to_dlpack(source))
    assert capsule.datatype == tensor.datatype


def test_is_capsule():
    assert dlpack.is_capsule(exported()[1])
    assert not dlpack.is_capsule(np.zeros(1))
