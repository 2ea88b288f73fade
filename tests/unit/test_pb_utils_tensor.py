"""pb_utils.Tensor: what models see, and what the stub relies on."""

import gc
import sys
import weakref

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.pb_utils.tensor import SharedTensor
from gpubridge.tensor import bytes_codec
from gpubridge.tensor.datatypes import DATATYPES
from gpubridge.tensor.dtypes import numpy_dtype

pytestmark = pytest.mark.both_runtimes

Tensor = pb_utils.Tensor
NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]


def received(array, datatype):
    memory = bytearray(array.tobytes())
    return memory, Tensor._received("IN", datatype, array.shape, memoryview(memory))


def test_a_tensor_refers_to_its_array():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor("OUT", array)
    assert tensor.name() == "OUT"
    assert tensor.shape() == [2, 3]
    assert tensor.as_numpy() is array
    assert tensor.is_cpu()
    assert tensor.triton_dtype() == 11
    assert Tensor(b"OUT", array).name() == "OUT"


@pytest.mark.parametrize("datatype", NUMERIC)
def test_datatype_of_an_array(datatype):
    array = np.zeros((2, 2), numpy_dtype(datatype))
    tensor = Tensor("OUT", array)
    assert tensor._datatype == datatype
    assert bytes(tensor._payload()) == array.tobytes()


@pytest.mark.parametrize("arguments", [("A", None), ("A", [1]), ("A", 3), (None, np.zeros(1)), ()])
def test_wrong_argument_types(arguments):
    with pytest.raises(TypeError):
        Tensor(*arguments)


@pytest.mark.parametrize("dtype", ["c8", ">f4", "U3"])
def test_unsupported_dtypes(dtype):
    with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported.$"):
        Tensor("A", np.zeros(2, dtype))


@pytest.mark.parametrize("pick", [lambda a: a.T, lambda a: a[:, ::2], lambda a: a[::-1]])
def test_arrays_that_are_not_contiguous_are_copied(pick):
    array = np.arange(12).reshape(3, 4)
    tensor = Tensor("A", pick(array))
    assert tensor.as_numpy().flags.c_contiguous
    assert tensor.as_numpy().tolist() == pick(array).tolist()
    assert bytes(tensor._payload()) == pick(array).tobytes()
    assert not np.shares_memory(tensor.as_numpy(), array)


def test_strings_are_serialised_for_sending():
    array = np.array([[b"a", "ü"], [3, b""]], dtype=object)
    tensor = Tensor("A", array)
    assert tensor._datatype == "BYTES"
    assert tensor.shape() == [2, 2]
    assert tensor.as_numpy() is array
    assert bytes_codec.decode(tensor._payload()).tolist() == [b"a", "ü".encode(), b"3", b""]
    assert bytes_codec.decode(Tensor("A", np.array([b"x", b"yz"]))._payload()).tolist() == [
        b"x",
        b"yz",
    ]


def test_payload_is_not_a_copy():
    array = np.zeros((2, 3), np.float16)
    payload = Tensor("A", array)._payload()
    array[0, 0] = 1
    assert bytes(payload) == array.tobytes()
    assert payload.flags.c_contiguous


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_payload_of_odd_shapes(shape):
    array = np.ones(shape, np.float32)
    assert bytes(Tensor("A", array)._payload()) == array.tobytes()


def test_bfloat16_arrays():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    for shaped in (array, array.T, array[0, 0:1].reshape(()), array[:0]):
        tensor = Tensor("A", shaped)
        assert tensor._datatype == "BF16"
        assert bytes(tensor._payload()) == shaped.tobytes()


@pytest.mark.parametrize("datatype", NUMERIC)
def test_a_received_tensor_is_a_view(datatype):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(numpy_dtype(datatype))
    memory, tensor = received(array, datatype)
    view = tensor.as_numpy()
    assert view.dtype == array.dtype
    assert view.tolist() == array.tolist()
    assert tensor.as_numpy() is view
    view[0, 0] = 1
    assert bytes(memory) == view.tobytes()
    assert tensor._payload().obj is memory


def test_read_only_memory_gives_read_only_arrays():
    tensor = Tensor._received("IN", "FP32", (2,), memoryview(bytes(8)))
    assert not tensor.as_numpy().flags.writeable


def test_received_tensors_without_elements():
    assert Tensor._received("IN", "INT8", (0, 3), memoryview(b"")).as_numpy().shape == (0, 3)
    assert Tensor._received("IN", "BYTES", (0, 3), memoryview(b"")).as_numpy().shape == (0, 3)


def test_the_lease_ends_with_the_last_view():
    class Lease(bytearray):
        pass

    lease = Lease(16)
    ended = weakref.ref(lease)
    gc.disable()
    try:
        tensor = Tensor._received("IN", "FP32", (4,), memoryview(lease))
        del lease
        kept = tensor.as_numpy()[1:3]
        capsule = tensor.to_dlpack()
        del tensor
        assert ended() is not None
        del capsule
        assert ended() is not None
        kept[:] = 1
        del kept
        assert ended() is None
    finally:
        gc.enable()


def test_received_strings_are_decoded_once_and_on_demand():
    strings = [b"a", b"", b"\xff\0"]
    data = bytes_codec.encode(np.array(strings, object))
    tensor = Tensor._received("IN", "BYTES", (3, 1), memoryview(data))
    assert tensor._payload().obj is data
    array = tensor.as_numpy()
    assert array.shape == (3, 1)
    assert array.ravel().tolist() == strings
    assert tensor.as_numpy() is array


def test_strings_are_sent_as_they_were_when_the_tensor_came_to_be():
    # As at Triton: a model may fill one array for all requests of a batch.
    data = bytes_codec.encode(np.array([b"a", b"b"], object))
    received = Tensor._received("IN", "BYTES", (2,), memoryview(data))
    array = np.array([b"a", b"b"], object)
    for tensor in (received, Tensor("A", array)):
        tensor.as_numpy()[1] = b"edited"
        assert bytes_codec.decode(tensor._payload()).tolist() == [b"a", b"b"]


def test_values_without_a_text_are_refused_at_construction():
    class Mute:
        def __str__(self):
            raise KeyError("mute")

    with pytest.raises(KeyError, match="mute"):
        Tensor("A", np.array([Mute()], object))
    with pytest.raises(UnicodeEncodeError):
        Tensor("A", np.array(["\udc80"], object))


def shared(array, datatype):
    copied = []

    def copy(source):
        copied.append(source.nbytes)
        return memoryview(bytearray(source))

    tensor = SharedTensor._received("IN", datatype, array.shape, memoryview(bytes(array.data)))
    tensor._belongs_to(copy)
    return tensor, copied


def test_the_array_of_a_shared_tensor_is_the_models_own():
    tensor, copied = shared(np.arange(3, dtype=np.float32), "FP32")
    assert not copied
    tensor.as_numpy()[:] = 7
    assert np.from_dlpack(tensor).tolist() == [7, 7, 7]
    view = np.from_dlpack(tensor)
    # NumPy 1 marks every array that it takes as read-only.
    (view if view.flags.writeable else tensor.as_numpy())[:] = 8
    assert (tensor.as_numpy().tolist(), view.tolist()) == ([8, 8, 8], [8, 8, 8])
    # Handed on it is what arrived.
    assert np.frombuffer(tensor._payload(), np.float32).tolist() == [0, 1, 2]
    assert copied == [12]


def test_a_shared_tensor_that_nobody_looks_at_is_not_copied():
    tensor, copied = shared(np.zeros(0, np.float32), "FP32")
    assert tensor.as_numpy().shape == (0,)
    strings = np.frombuffer(bytes_codec.encode(np.array([b"a"], object)), np.uint8)
    text, also = shared(strings, "BYTES")
    text._shape = (1,)
    assert text.as_numpy().tolist() == [b"a"]
    assert not copied
    assert not also


def test_malformed_strings_are_the_models_exception():
    tensor = Tensor._received("IN", "BYTES", (1,), memoryview(b"\5\0\0\0a"))
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Invalid bytes tensor data: string extends beyond buffer$",
    ):
        tensor.as_numpy()


def test_bf16_needs_ml_dtypes(monkeypatch):
    tensor = Tensor._received("IN", "BF16", (2,), memoryview(b"\x80\x3f\x00\x40"))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(pb_utils.TritonModelException) as caught:
        tensor.as_numpy()
    assert str(caught.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
        "instead."
    )
    monkeypatch.undo()
    pytest.importorskip("ml_dtypes")
    assert tensor.as_numpy().astype(np.float32).tolist() == [1, 2]


def test_to_dlpack_raises_the_reference_count_by_exactly_one():
    for tensor in (Tensor("A", np.zeros(4)), received(np.zeros(4), "FP64")[1]):
        before = sys.getrefcount(tensor)
        capsule = tensor.to_dlpack()
        assert sys.getrefcount(tensor) == before + 1
        del capsule
        assert sys.getrefcount(tensor) == before


@pytest.mark.parametrize("datatype", NUMERIC)
def test_numpy_takes_a_tensor(datatype):
    array = np.array([[0, 1], [1, 1]]).astype(numpy_dtype(datatype))
    if not hasattr(np, "from_dlpack"):
        pytest.skip("this NumPy has no from_dlpack")
    if datatype == "BOOL" and tuple(map(int, np.__version__.split(".")[:2])) < (1, 25):
        pytest.skip("this NumPy has no bool in DLPack")
    taken = np.from_dlpack(Tensor("A", array))
    assert taken.dtype == array.dtype
    assert np.shares_memory(taken, array)


def test_torch_and_back():
    torch = pytest.importorskip("torch")
    from torch.utils.dlpack import from_dlpack

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor("A", array)
    for taken in (from_dlpack(tensor.to_dlpack()), from_dlpack(tensor), torch.from_dlpack(tensor)):
        taken[0, 0] += 1
    assert array[0, 0] == 3
    source = torch.arange(4, dtype=torch.float32)
    for given in (source, source.__dlpack__()):
        back = Tensor.from_dlpack("OUT", given)
        assert back.name() == "OUT"
        assert back.as_numpy().tolist() == [0, 1, 2, 3]
        assert back.as_numpy().ctypes.data == source.data_ptr()
        assert bytes(back._payload()) == back.as_numpy().tobytes()


def test_dlpack_keywords():
    array = np.zeros(3, np.float32)
    tensor = Tensor("A", array)
    assert tensor.__dlpack_device__() == (1, 0)
    for capsule in (
        tensor.__dlpack__(),
        tensor.__dlpack__(None),
        tensor.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=False),
    ):
        assert np.shares_memory(Tensor.from_dlpack("B", capsule).as_numpy(), array)
    copied = Tensor.from_dlpack("B", tensor.__dlpack__(copy=True)).as_numpy()
    assert copied.tolist() == [0, 0, 0]
    assert not np.shares_memory(copied, array)
    with pytest.raises(BufferError, match=r"expected dl_device .* got \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))


def test_strings_have_no_dlpack():
    tensor = Tensor("A", np.array([b"a"], object))
    for export in (tensor.to_dlpack, tensor.__dlpack__, lambda: tensor.__dlpack__(copy=True)):
        with pytest.raises(
            pb_utils.TritonModelException,
            match=r"^DLPack does not have support for string tensors.$",
        ):
            export()


def test_what_a_derived_class_says_of_itself_is_not_believed():
    class Boaster(np.ndarray):
        dtype = property(lambda _: np.dtype(np.float64))
        shape = property(lambda _: (1000,))
        nbytes = property(lambda _: 8000)

    tensor = Tensor("A", np.float32([1, 2]).view(Boaster))
    assert (tensor.shape(), tensor.triton_dtype()) == (
        [2],
        Tensor("B", np.float32([1])).triton_dtype(),
    )
    assert tensor._payload().nbytes == 8


@pytest.mark.parametrize("given", [None, 5, np.zeros(1)])
def test_a_producer_that_gives_no_capsule(given):
    class Producer:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return given

    with pytest.raises(pb_utils.TritonModelException, match="has not been consumed"):
        Tensor.from_dlpack("A", Producer())


def test_the_producers_own_errors_pass_through():
    class Stubborn:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise RuntimeError("requires grad")

    with pytest.raises(RuntimeError, match="requires grad"):
        Tensor.from_dlpack("A", Stubborn())
