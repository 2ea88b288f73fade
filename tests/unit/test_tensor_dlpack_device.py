"""DLPack tensors in CUDA memory: one behaviour, with the compiled module and without."""

import ctypes
import gc
import sys
import threading
import weakref

import numpy as np
import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import dlpack
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.device_bytes import DeviceBytes
from tests.unit.device_doubles import (
    BRIDGE_STREAM,
    CudaArray,
    Owner,
    Stream,
    managed_of,
    name_of,
    seen_by_consumer,
    strides_of,
)

pytestmark = pytest.mark.usefixtures("dlpack_engine")
NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]
NUMPY_VERSIONED = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)
POINTER = 0x7F12_3456_7800


def exported(datatype="FP32", shape=(2, 3), version=None, owner=None, **fields):
    options = {"read_only": False, "copied": False, **fields}
    device = (dlpack.CUDA, 1)
    owner = owner or object()
    return dlpack.make_capsule(owner, POINTER, datatype, shape, device, version, **options)


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("datatype", [*NUMERIC, "BF16"])
def test_nothing_of_the_memory_is_looked_at(datatype, version):
    # The address is not mapped: a read would end the process.
    capsule = exported(datatype, (2, 3), version)
    assert seen_by_consumer(capsule)[:3] == (POINTER, (2, 1), (2, 3))
    taken = dlpack.import_capsule(capsule, Stream(), 1)
    assert (taken.datatype, taken.shape) == (datatype, (2, 3))
    assert taken.memory.pointer == POINTER
    assert taken.memory.nbytes == 6 * DATATYPES[datatype].item_size
    assert taken.memory.ordinal == 1


@pytest.mark.parametrize("shape", [(), (1,), (4, 2, 5), (1, 3, 1)])
def test_strides_are_those_of_c_order(shape):
    *_, dims, strides = seen_by_consumer(exported(shape=shape, version=(1, 0)))
    assert dims == shape
    # Those of dimensions of one element do not matter.
    matter = [axis for axis, dim in enumerate(shape) if dim != 1]
    assert strides is None or all(strides[axis] == strides_of(shape)[axis] for axis in matter)


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_no_elements_have_no_address(shape, version):
    options = {"read_only": False, "copied": False}
    capsule = dlpack.make_capsule(object(), 0, "FP16", shape, (2, 0), version, **options)
    assert seen_by_consumer(capsule)[:3] == (0, (2, 0), shape)
    stream = Stream()
    taken = dlpack.import_capsule(capsule, stream)
    assert taken.shape == shape
    assert (taken.memory.pointer, taken.memory.nbytes) == (0, 0)
    assert stream.asked == []


@pytest.mark.parametrize(("read_only", "copied", "flags"), [(True, False, 1), (False, True, 2)])
def test_flags(read_only, copied, flags, dlpack_engine):
    capsule = exported(version=(1, 0), read_only=read_only, copied=copied)
    if dlpack_engine == "python" and not NUMPY_VERSIONED:
        pytest.skip("this NumPy makes unversioned capsules only, which have no flags")
    assert managed_of(capsule).flags == flags
    assert dlpack.import_capsule(capsule, Stream(), 1).memory.read_only is read_only


def test_a_capsule_holds_exactly_one_reference_to_its_owner():
    owner = Owner(4)
    dead = weakref.ref(owner)
    before = sys.getrefcount(owner)
    capsule = exported(owner=owner)
    assert sys.getrefcount(owner) == before + 1
    del capsule
    assert sys.getrefcount(owner) == before
    taken = dlpack.import_capsule(exported(owner=owner), Stream(), 1)
    del owner
    assert dead() is not None
    del taken
    assert dead() is None


def test_a_thread_that_python_does_not_know_may_let_go():
    """As a framework's own threads do, without the GIL and without a thread state."""
    deleted = threading.Event()
    owner = Owner(4)
    weakref.finalize(owner, deleted.set)
    capsule = exported(owner=owner)
    del owner
    managed = managed_of(capsule)
    address, deleter = ctypes.addressof(managed), managed.deleter
    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_SetName", ctypes.pythonapi)
    )(capsule, USED_NAME)
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    pointer = ctypes.c_void_p
    libc.pthread_create.argtypes = [ctypes.POINTER(ctypes.c_ulong), pointer, pointer, pointer]
    libc.pthread_join.argtypes = [ctypes.c_ulong, pointer]
    # ctypes lets go of the GIL around both calls.
    assert libc.pthread_create(ctypes.byref(thread), None, deleter, address) == 0
    assert libc.pthread_join(thread, None) == 0
    assert deleted.is_set()


#: CPython keeps the pointer that PyCapsule_SetName is given.
USED_NAME = b"used_dltensor"


@pytest.mark.parametrize("versioned", [False, True])
def test_a_producer_is_asked_with_the_streams_handle(versioned):
    producer, stream = CudaArray(np.arange(6, dtype=np.int32), versioned), Stream()
    taken = dlpack.import_object(producer, stream)
    assert producer.streams == [BRIDGE_STREAM]
    assert stream.asked == []
    data = taken.memory
    assert isinstance(data, DeviceBytes)
    assert (data.pointer, data.nbytes, data.ordinal) == (producer.owner.address, 24, 0)
    assert data.ready is stream
    assert data.shared
    assert not data.read_only


def test_a_producer_that_knows_no_version():
    class Old(CudaArray):
        def __dlpack__(self, stream=None):
            return super().__dlpack__(stream)

    producer, stream = Old(np.zeros(3, np.float16)), Stream()
    assert dlpack.import_object(producer, stream).datatype == "FP16"
    assert producer.streams == [BRIDGE_STREAM]
    assert stream.asked == []


def test_a_producer_that_knows_no_stream_is_ordered_like_a_capsule():
    class Older(CudaArray):
        def __dlpack__(self):
            return self.capsule()

    stream = Stream()
    assert dlpack.import_object(Older(np.zeros(3, np.float16)), stream).datatype == "FP16"
    assert stream.asked == [("after", 1)]


def test_a_capsule_is_ordered_on_the_default_stream_before_it_is_consumed():
    producer, stream = CudaArray(np.zeros(3, np.float32)), Stream()
    capsule = producer.capsule()
    stream.failure = BridgeError("the device is gone")
    with pytest.raises(BridgeError, match="the device is gone"):
        dlpack.import_capsule(capsule, stream)
    assert name_of(capsule) == b"dltensor"
    stream.failure = None
    taken = dlpack.import_capsule(capsule, stream)
    assert stream.asked == [("after", 1)]
    assert name_of(capsule) == b"used_dltensor"
    assert taken.memory.ready is stream


def test_the_producers_memory_lives_until_the_last_reference_is_gone():
    producer = CudaArray(np.zeros(4, np.float32))
    dead = weakref.ref(producer.owner)
    data = dlpack.import_object(producer, Stream()).memory
    del producer
    gc.collect()
    assert dead() is not None
    thread = threading.Thread(target=lambda held: held.clear(), args=([data],))
    del data
    thread.start()
    thread.join()
    del thread
    assert dead() is None


def test_byte_offset_and_null_strides():
    producer = CudaArray(np.arange(8, dtype=np.uint16), byte_offset=6, shape=(4,), strides=None)
    data = dlpack.import_object(producer, Stream()).memory
    assert data.pointer == producer.owner.address + 6
    assert data.nbytes == 8


@pytest.mark.parametrize(
    ("array", "fields", "datatype"),
    [
        (np.zeros((1, 2, 1, 3), np.float32), {"strides": (-99, 3, 12345, 1)}, "FP32"),
        (np.zeros((2, 3), np.uint16), {"code": 4}, "BF16"),
        (np.zeros((2, 3), np.bool_), {}, "BOOL"),
        (np.zeros((2, 3), np.int64), {"device_type": dlpack.CUDA_MANAGED}, "INT64"),
        (np.zeros((2, 3), np.int64), {"device_id": 1}, "INT64"),
    ],
)
def test_accepted_capsules(array, fields, datatype):
    taken = dlpack.import_object(CudaArray(array, **fields), Stream())
    assert (taken.datatype, taken.shape) == (datatype, array.shape)
    assert taken.memory.nbytes == array.nbytes
    assert taken.memory.ordinal == fields.get("device_id", 0)


@pytest.mark.parametrize("kind", [dlpack.CPU, dlpack.CUDA_HOST])
def test_host_memory_is_taken_as_such_and_without_a_stream(kind):
    producer, stream = CudaArray(np.arange(3, dtype=np.uint8), device_type=kind), Stream()
    taken = dlpack.import_object(producer, stream)
    assert taken.memory.tobytes() == b"\0\1\2"
    assert producer.streams == [None]
    assert stream.asked == []


REFUSED = [
    ({"lanes": 2}, "with one lane, got .* 2 lanes$"),
    ({"bits": 8}, "type code 2 with 8 bits"),
    ({"code": 4}, "^Expected BF16 tensor to have 16 bits, but had: 32$"),
    ({"code": 5}, "no datatype for a complex number"),
    ({"code": 7, "bits": 8}, "no datatype for float8_e3m4; pass a view as integers$"),
    ({"code": 10, "bits": 8}, "no datatype for float8_e4m3fn; pass a view as integers$"),
    ({"code": 14, "bits": 8}, "no datatype for float8_e8m0fnu; pass a view as integers$"),
    ({"code": 17, "bits": 4}, "no datatype for float4_e2m1fn"),
    ({"code": 99}, "type code 99 with 32 bits and 1 lanes$"),
    (
        {"strides": (2,)},
        "^DLPack tensor is not contiguous. Only contiguous DLPack tensors that are",
    ),
    ({"strides": (0,)}, "not contiguous"),
    ({"strides": (-1,)}, "not contiguous"),
    ({"device_type": 10}, "^DLDevice type 10 is not support by Python backend.$"),
    ({"device_id": 1}, "^expected a DLPack capsule on cuda:0, where .*, got one on cuda:1; pass"),
    ({"data": None}, "^expected a tensor of 16 bytes to have an address, got none$"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_a_capsule_that_is_refused_is_not_consumed(fields, text):
    producer, stream = CudaArray(np.zeros(4, np.float32), **fields), Stream()
    capsule = producer.capsule()
    with pytest.raises(BridgeError, match=text):
        dlpack.import_capsule(capsule, stream)
    assert name_of(capsule) == b"dltensor"
    assert stream.asked == []
    dead = weakref.ref(producer.owner)
    del producer, capsule
    assert dead() is None


@pytest.mark.parametrize("kind", [dlpack.CUDA, dlpack.CUDA_MANAGED])
def test_without_a_device_cuda_memory_is_refused(kind):
    producer = CudaArray(np.zeros(4, np.float32), device_type=kind)
    for take in (dlpack.import_object, lambda given: dlpack.import_capsule(given.capsule())):
        with pytest.raises(BridgeError, match="expected a tensor in host memory, got") as caught:
            take(producer)
        assert caught.value.code is ErrorCode.UNSUPPORTED
    assert producer.streams == []
