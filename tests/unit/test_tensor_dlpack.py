"""DLPack capsules that we are given, with the compiled module and without; some are torch's."""

import gc

import numpy as np
import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import dlpack
from tests.unit.dlpack_capsules import Producer, exported, name_of

pytestmark = pytest.mark.usefixtures("dlpack_engine")


def test_import_is_a_view_and_deletes_once_with_the_last_view():
    producer = Producer(np.arange(6, dtype=np.int64).reshape(2, 3))
    tensor = dlpack.import_capsule(producer.capsule)
    assert name_of(producer.capsule) == b"used_dltensor"
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
        assert name_of(producer.capsule) == b"used_dltensor_versioned"
        del tensor
        assert producer.deleted == 1


def test_a_consumed_capsule_is_refused():
    producer = Producer(np.zeros(4, np.float32))
    dlpack.import_capsule(producer.capsule)
    with pytest.raises(BridgeError, match="has not been consumed") as caught:
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
    assert name_of(producer.capsule) == b"dltensor_versioned"
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
    assert name_of(producer.capsule) == b"dltensor"


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


def test_a_negated_view_of_torch_comes_in_with_its_values():
    torch = pytest.importorskip("torch")
    tensor = dlpack.import_object(
        torch.complex(torch.ones(2), torch.full((2,), 3.0)).conj().imag[:1]
    )
    assert np.frombuffer(tensor.memory, np.float32).tolist() == [-3]


def test_is_capsule():
    assert dlpack.is_capsule(exported()[1])
    assert not dlpack.is_capsule(np.zeros(1))
