"""pb_utils.Tensor in CUDA memory: what models see, and what the stub relies on."""

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import host
from gpubridge.pb_utils.tensor import DeviceTensor
from gpubridge.tensor import dlpack, streams
from gpubridge.tensor.device_bytes import DeviceBytes
from tests.unit.device_doubles import (
    MODEL_STREAM,
    CudaArray,
    DescribedArray,
    Owner,
    Stream,
    name_of,
    seen_by_consumer,
)

Tensor = pb_utils.Tensor
Failure = pb_utils.TritonModelException


def arrived(array, datatype="FP32", ready=None, **fields):
    """A tensor that came to the model on its device."""
    owner = Owner(array.tobytes())
    data = DeviceBytes(owner.address, array.nbytes, 0, owner, ready, **fields)
    return DeviceTensor._on_device("IN", datatype, array.shape, data)


def test_properties_of_a_tensor_on_a_device(memory):
    tensor = Tensor.from_dlpack("OUT", CudaArray(np.zeros((2, 3), np.float32), device_id=1))
    assert isinstance(tensor, Tensor)
    assert tensor.name() == "OUT"
    assert tensor.shape() == [2, 3]
    assert tensor.triton_dtype() == 11
    assert not tensor.is_cpu()
    assert tensor.device == "cuda:1"
    assert tensor.__dlpack_device__() == (2, 1)
    assert Tensor("A", np.zeros(1)).device == "cpu"
    assert memory.copied == {"d2h": 0, "d2d": 0}


@pytest.mark.parametrize("kind", [CudaArray, DescribedArray])
def test_a_frameworks_tensor_becomes_one(kind, memory, dlpack_engine):
    source = kind(np.arange(4, dtype=np.int64))
    tensor = Tensor.from_dlpack("OUT", source)
    assert tensor._device_bytes.pointer == source.owner.address
    assert tensor._device_bytes.ready is memory.stream
    assert tensor.as_numpy().tolist() == [0, 1, 2, 3]
    dead = weakref.ref(source.owner)
    del source
    assert dead() is not None
    del tensor
    assert dead() is None


@pytest.mark.parametrize(
    "source",
    [CudaArray(np.zeros(4)), CudaArray(np.zeros(4)).capsule(), DescribedArray(np.zeros(4))],
)
@pytest.mark.parametrize("served", [True, False])
def test_without_a_gpu_they_are_refused(source, served):
    if served:
        host.attach(host.Host("/models/m/1", print))
    with pytest.raises(Failure, match="KIND_GPU, or pass tensor"):
        Tensor.from_dlpack("OUT", source)
    host.detach()


def test_failures_of_the_device_are_the_models_exception(memory):
    memory.stream.failure = BridgeError("cuEventRecord failed")
    tensor = arrived(np.zeros(2, np.float32), ready=memory.stream)
    for attempt in (
        lambda: Tensor.from_dlpack("OUT", CudaArray(np.zeros(4)).capsule()),
        lambda: Tensor.from_dlpack("OUT", DescribedArray(np.zeros(4))),
        tensor.to_dlpack,
        tensor.__dlpack__,
        tensor.as_numpy,
    ):
        with pytest.raises(Failure, match=r"^cuEventRecord failed$"):
            attempt()
    memory.failure = BridgeError("the arena is full", ErrorCode.UNAVAILABLE)
    with pytest.raises(Failure, match=r"^the arena is full$"):
        tensor.__dlpack__(copy=True)


def test_as_numpy_is_one_copy(memory):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    ready = Stream(7)
    tensor = arrived(array, ready=ready)
    copy = tensor.as_numpy()
    assert copy.tolist() == array.tolist()
    assert ready.asked == [("before", memory.stream.handle)]
    assert memory.stream.asked == [("wait",)]
    copy[0, 0] = 9
    assert tensor.as_numpy() is copy
    assert tensor._device_bytes.owner.bytes() == array.tobytes()
    assert memory.copied["d2h"] == 24


def test_as_numpy_looks_again_where_others_may_have_written(memory, dlpack_engine):
    tensor = arrived(np.zeros(2, np.float32))
    assert tensor.as_numpy().tolist() == [0, 0]
    tensor.__dlpack__(stream=MODEL_STREAM)
    tensor._device_bytes.owner.write(np.ones(2, np.float32).tobytes())
    assert tensor.as_numpy().tolist() == [1, 1]
    assert ("after", streams.ANY_STREAM) in memory.stream.asked
    source = CudaArray(np.zeros(2, np.float32))
    taken = Tensor.from_dlpack("OUT", source)
    assert taken.as_numpy().tolist() == [0, 0]
    source.owner.write(np.ones(2, np.float32).tobytes())
    assert taken.as_numpy().tolist() == [1, 1]


def test_bf16_on_the_host(memory, monkeypatch):
    tensor = arrived(np.array([0x3F80, 0x4000], np.uint16), "BF16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(Failure, match=r"^Tensor dtype is BF16 and cannot be converted to NumPy."):
        tensor.as_numpy()
    assert bytes(tensor._payload()) == b"\x80\x3f\x00\x40"
    monkeypatch.undo()
    pytest.importorskip("ml_dtypes")
    assert tensor.as_numpy().astype(np.float32).tolist() == [1, 2]


def test_data_without_elements_needs_no_device(dlpack_engine):
    tensor = DeviceTensor._on_device("A", "INT8", (0, 3), DeviceBytes(0, 0, 0))
    assert tensor.as_numpy().shape == (0, 3)
    assert bytes(tensor._payload()) == b""
    for capsule in (tensor.to_dlpack(), tensor.__dlpack__(5), tensor.__dlpack__(copy=True)):
        assert seen_by_consumer(capsule)[:3] == (0, (2, 0), (0, 3))
    assert tensor.__cuda_array_interface__["data"] == (0, False)


class Owned(int):
    """A stream with an object that owns it."""

    def __cuda_stream__(self):
        return 0, int(self)


@pytest.mark.parametrize(
    ("stream", "asked", "kept"),
    [
        (None, [("before", 1)], {1}),
        (1, [("before", 1)], {1}),
        (0, [("before", 1)], {1}),
        # Another stream in each thread; the legacy stream waits for all of them.
        (2, [("before", 2)], {1}),
        (-1, [], {1}),
        (MODEL_STREAM, [("before", MODEL_STREAM)], {streams.ANY_STREAM}),
        (Owned(MODEL_STREAM), [("before", MODEL_STREAM)], {MODEL_STREAM}),
    ],
)
def test_the_consumers_stream_waits_for_the_data(stream, asked, kept, dlpack_engine):
    ready = Stream()
    tensor = arrived(np.zeros(2, np.float32), ready=ready)
    capsule = tensor.__dlpack__(stream=stream)
    assert ready.asked == asked
    assert seen_by_consumer(capsule)[:3] == (tensor._device_bytes.pointer, (2, 0), (2,))
    assert set(tensor._device_bytes.streams) == kept
    assert tensor._device_bytes.shared


def test_streams_that_are_none():
    tensor = arrived(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"expected stream to be None, -1, .* got -2$"):
        tensor.__dlpack__(stream=-2)
    with pytest.raises(
        TypeError,
        match="expected stream to be an int, an object with __cuda_stream__, or None, got str",
    ):
        tensor.__dlpack__(stream="1")
    assert not tensor._device_bytes.shared


def test_tensors_made_on_the_bridges_stream_need_no_order_there():
    bridge = Stream()
    arrived(np.zeros(2, np.float32), ready=bridge)._device_bytes.order_into(bridge)
    assert bridge.asked == []


def test_an_owner_can_know_the_streams_when_the_bytes_are_gone():
    used = {}
    tensor = arrived(np.zeros(2, np.float32), streams=used)
    tensor.__dlpack__(stream=Owned(MODEL_STREAM))
    del tensor
    assert set(used) == {MODEL_STREAM}


def test_a_bare_capsule_of_what_is_complete_waits_for_nothing(dlpack_engine):
    ready = Stream()
    ready.idle = True
    tensor = arrived(np.zeros(2, np.float32), ready=ready)
    tensor.to_dlpack()
    assert ready.asked == [("done?",)]


def use_pytorch(monkeypatch, *others):
    current = SimpleNamespace(cuda_stream=MODEL_STREAM)
    cuda = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda device: current)
    for name in streams._OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    for name in others:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


@pytest.mark.parametrize("other", ["jax", "numba", "tensorrt"])
def test_a_bare_capsule_is_complete_where_another_library_may_take_it(
    monkeypatch, dlpack_engine, other
):
    use_pytorch(monkeypatch, other)
    ready = Stream()
    tensor = arrived(np.zeros(2, np.float32), ready=ready)
    tensor.to_dlpack()
    assert ready.asked == [("done?",), ("wait",)]
    assert set(tensor._device_bytes.streams) == {1, MODEL_STREAM}


def test_a_raw_consumer_may_use_the_data_on_framework_streams(monkeypatch):
    use_pytorch(monkeypatch)
    for use in (lambda tensor: tensor.__dlpack__(stream=-1), lambda tensor: tensor.__dlpack__()):
        tensor = arrived(np.zeros(2, np.float32))
        use(tensor)
        assert set(tensor._device_bytes.streams) == {1, MODEL_STREAM}


def test_to_dlpack_raises_the_reference_count_by_exactly_one(dlpack_engine):
    tensor = arrived(np.zeros(4, np.float32))
    for export in (tensor.to_dlpack, tensor.__dlpack__):
        before = sys.getrefcount(tensor)
        capsule = export()
        assert sys.getrefcount(tensor) == before + 1
        del capsule
        assert sys.getrefcount(tensor) == before


def test_versions(dlpack_engine):
    tensor = arrived(np.zeros(4, np.float32), read_only=True)
    assert name_of(tensor.__dlpack__()) == b"dltensor"
    assert name_of(tensor.__dlpack__(max_version=(0, 8))) == b"dltensor"
    capsule = tensor.__dlpack__(max_version=(1, 3))
    if name_of(capsule) == b"dltensor":
        pytest.skip("this NumPy makes unversioned capsules only")
    assert dlpack.import_capsule(capsule, Stream()).memory.read_only


@pytest.mark.parametrize("device", [(2, 0), None])
def test_a_copy_on_the_device(device, memory, dlpack_engine):
    ready = Stream(7)
    tensor = arrived(np.arange(3, dtype=np.float32), ready=ready, read_only=True)
    capsule = tensor.__dlpack__(stream=MODEL_STREAM, dl_device=device, copy=True)
    assert ready.asked == [("before", memory.stream.handle)]
    assert memory.stream.asked == [("before", MODEL_STREAM)]
    assert memory.copied == {"d2h": 0, "d2d": 12}
    assert not tensor._device_bytes.streams
    taken = Tensor.from_dlpack("B", capsule)
    assert taken._device_bytes.pointer != tensor._device_bytes.pointer
    assert taken.as_numpy().tolist() == [0, 1, 2]
    assert not taken._device_bytes.read_only


@pytest.mark.parametrize("copy", [None, True])
def test_a_copy_on_the_host(copy, memory, dlpack_engine):
    tensor = arrived(np.arange(3, dtype=np.float32))
    taken = Tensor.from_dlpack("B", tensor.__dlpack__(dl_device=(1, 0), copy=copy))
    assert taken.is_cpu()
    assert taken.as_numpy().tolist() == [0, 1, 2]
    assert memory.copied == {"d2h": 12, "d2d": 0}
    assert not tensor._device_bytes.streams


def test_no_copy_where_there_must_be_one(memory):
    tensor = arrived(np.arange(3, dtype=np.float32))
    with pytest.raises(BufferError, match="wanted on the host, got False"):
        tensor.__dlpack__(dl_device=(1, 0), copy=False)
    assert seen_by_consumer(tensor.__dlpack__(copy=False))[0] == tensor._device_bytes.pointer
    assert memory.copied == {"d2h": 0, "d2d": 0}


@pytest.mark.parametrize("device", [(2, 1), (13, 0), (3, 0)])
def test_other_devices(device):
    with pytest.raises(BufferError, match=r"expected dl_device to be \(2, 0\), where the data is"):
        arrived(np.zeros(1, np.float32)).__dlpack__(dl_device=device)


def test_the_cuda_array_interface():
    tensor = arrived(np.zeros((2, 2), np.float16), "FP16", ready=Stream())
    interface = tensor.__cuda_array_interface__
    assert interface["data"] == (tensor._device_bytes.pointer, False)
    assert interface["shape"] == (2, 2)
    assert interface["typestr"] == "<f2"
    assert interface["stream"] == 1
    assert not hasattr(arrived(np.zeros(2, np.uint16), "BF16"), "__cuda_array_interface__")
    assert not hasattr(Tensor("A", np.zeros(2)), "__cuda_array_interface__")


def test_numpy_takes_a_copy_on_the_host(memory):
    tensor = arrived(np.arange(3, dtype=np.float32))
    if tuple(map(int, np.__version__.split(".")[:2])) < (2, 1):
        pytest.skip("this NumPy asks for no device")
    assert np.from_dlpack(tensor, device="cpu").tolist() == [0, 1, 2]
    assert memory.copied["d2h"] == 12
