"""__cuda_array_interface__: tensors taken from libraries that have only that, and shown to them."""

import weakref

import numpy as np
import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor import cuda_array
from gpubridge.tensor.device_bytes import DeviceBytes
from tests.unit.device_doubles import MODEL_STREAM, DescribedArray, Stream


def taken(array, **fields):
    producer, stream = DescribedArray(array, **fields), Stream()
    return producer, stream, cuda_array.import_cuda_array(producer, stream, 1)


def test_described_arrays_are_accepted():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    producer, stream, tensor = taken(array)
    assert (tensor.datatype, tensor.shape) == ("INT16", (2, 3))
    data = tensor.memory
    assert (data.pointer, data.nbytes, data.ordinal) == (producer.owner.address, 12, 1)
    assert data.ready is stream
    assert data.shared
    assert not data.read_only
    dead = weakref.ref(producer)
    del producer
    assert dead() is not None
    del data, tensor
    assert dead() is None


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, [("after", MODEL_STREAM)]),
        ({"stream": 1}, [("after", 1)]),
        ({"stream": 2}, [("after", 2)]),
        ({"stream": 0}, [("after", 1)]),
        ({"stream": None}, []),
        # Before version 3 there is no such field, and what is there means nothing.
        ({"version": 2}, [("after", 1)]),
    ],
)
def test_the_stream_that_is_named_is_waited_for(fields, asked):
    assert taken(np.zeros(2, np.float32), **fields)[1].asked == asked


@pytest.mark.parametrize(
    ("array", "strides"),
    [
        (np.zeros((2, 3), "f4"), (12, 4)),
        (np.zeros((1, 3), "f4"), (-7, 4)),
        (np.zeros((0, 3)), (1, 1)),
    ],
)
def test_strides_of_c_order(array, strides):
    assert taken(array, strides=strides)[2].shape == array.shape


def test_no_elements():
    _, stream, tensor = taken(np.zeros((0, 3), np.float32), data=(0, False))
    assert (tensor.memory.pointer, tensor.memory.nbytes, tensor.shape) == (0, 0, (0, 3))
    assert stream.asked == []


def test_read_only_memory():
    producer = DescribedArray(np.zeros(2, np.float32))
    producer.__cuda_array_interface__["data"] = (producer.owner.address, True)
    assert cuda_array.import_cuda_array(producer, Stream(), 0).memory.read_only


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"typestr": "<c8"}, ErrorCode.UNSUPPORTED, "got typestr '<c8'"),
        ({"typestr": ">f4"}, ErrorCode.UNSUPPORTED, "got typestr '>f4'"),
        ({"typestr": "|S4"}, ErrorCode.UNSUPPORTED, r"got typestr '\|S4'"),
        ({"typestr": "nonsense"}, ErrorCode.INVALID_ARG, "with shape, typestr, data and version"),
        ({"shape": (-1,)}, ErrorCode.INVALID_ARG, "got -1 in shape"),
        ({"shape": None}, ErrorCode.INVALID_ARG, "TypeError"),
        ({"strides": (8,)}, ErrorCode.UNSUPPORTED, "not contiguous"),
        ({"strides": (6,)}, ErrorCode.UNSUPPORTED, "not contiguous"),
        ({"strides": (-4,)}, ErrorCode.UNSUPPORTED, "not contiguous"),
        ({"mask": object()}, ErrorCode.UNSUPPORTED, "without a mask"),
        ({"data": (0, False)}, ErrorCode.INVALID_ARG, "to have an address"),
        ({"stream": -1}, ErrorCode.INVALID_ARG, "handle, got -1$"),
        ({"stream": "s"}, ErrorCode.INVALID_ARG, "handle, got 's'$"),
    ],
)
def test_refused_arrays(fields, code, text):
    producer, stream = DescribedArray(np.zeros(4, np.float32), **fields), Stream()
    with pytest.raises(BridgeError, match=text) as caught:
        cuda_array.import_cuda_array(producer, stream, 0)
    assert caught.value.code is code
    assert stream.asked == []


def test_without_a_device_it_is_refused():
    with pytest.raises(BridgeError, match="got one in CUDA memory"):
        cuda_array.import_cuda_array(DescribedArray(np.zeros(4)), None, 0)


def test_the_array_interface_of_a_tensor():
    stream = Stream()
    data = DeviceBytes(0xABC0, 12, 0, ready=stream)
    assert cuda_array.cuda_array_interface(data, "UINT16", (2, 3)) == {
        "version": 3,
        "shape": (2, 3),
        "typestr": "<u2",
        "data": (0xABC0, False),
        "strides": None,
        "stream": 1,
    }
    assert stream.asked == [("before", 1)]
    assert set(data.streams) == {1}
    assert data.shared


def test_complete_data_needs_no_stream():
    shown = cuda_array.cuda_array_interface(DeviceBytes(0xABC0, 4, 0, read_only=True), "BOOL", (4,))
    assert shown["stream"] is None
    assert shown["data"] == (0xABC0, True)
    assert shown["typestr"] == "|b1"


def test_no_elements_have_no_address():
    shown = cuda_array.cuda_array_interface(DeviceBytes(0xABC0, 0, 0), "FP64", (0, 2))
    assert shown["data"] == (0, False)


def test_bf16_has_no_name_there():
    with pytest.raises(BridgeError, match="BF16 tensors: use DLPack"):
        cuda_array.cuda_array_interface(DeviceBytes(0xABC0, 4, 0), "BF16", (2,))
