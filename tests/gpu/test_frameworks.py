"""PyTorch and CuPy give tensors to the bridge and take them from it, on a real GPU.

Each library is told to work slowly on a stream of its own, so that a missing wait gives old values.
"""

import gc

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.cuda_ipc import (
    CopyStream,
    DeviceArena,
    DeviceContext,
    DeviceSegment,
    list_devices,
    probe_devices,
)
from gpubridge.pb_utils import framework_arena, host
from gpubridge.pb_utils.tensor import DeviceTensor
from gpubridge.tensor import native
from gpubridge.tensor.device_bytes import DeviceBytes

FOUND = probe_devices()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND.count == 0, reason=f"no GPU can be used: {FOUND.reason}"),
]
Tensor = pb_utils.Tensor
COUNT = 1 << 20


class Memory:
    """A stub's device memory, without its server."""

    ordinal = 0

    def __init__(self):
        self.context = DeviceContext(list_devices()[0])
        self.context.make_current()
        self.stream = CopyStream(self.context)
        self.segment = DeviceSegment.allocate(self.context, 1, 256 << 20)
        self.arena = DeviceArena(self.segment)

    def allocate_device(self, nbytes):
        slot = self.arena.allocate(nbytes)
        hold = Hold(self, slot)
        return DeviceBytes(slot.pointer, nbytes, 0, hold, streams=hold.streams)

    def copy_to_host(self, data, target):
        data.order_into(self.stream)
        self.stream.d2h(target, data.pointer, data.nbytes)
        self.stream.wait()

    def copy_on_device(self, data):
        copy = self.allocate_device(data.nbytes)
        data.order_into(self.stream)
        self.stream.d2d(copy.pointer, data.pointer, data.nbytes)
        copy.ready = self.stream
        return copy

    def holds(self, pointer):
        return self.segment.pointer <= pointer < self.segment.pointer + self.segment.size


class Hold:
    """Gives a slot back when all that used it has passed."""

    def __init__(self, memory, slot):
        self.memory, self.slot, self.streams = memory, slot, {}

    def __del__(self):
        for stream in self.streams:
            self.memory.stream.order_after(stream)
        self.memory.stream.wait()
        self.memory.arena.free(self.slot)


class Torch:
    """Operations of PyTorch that the tests use."""

    def __init__(self):
        self.library = pytest.importorskip("torch")
        if not self.library.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        self.side = self.library.cuda.Stream()

    def made(self, array):
        return self.library.from_numpy(array).cuda()

    def taken(self, tensor):
        return self.library.from_dlpack(tensor)

    def address(self, array):
        return array.data_ptr()

    def values(self, array):
        return array.cpu().numpy()

    def on_side(self):
        return self.library.cuda.stream(self.side)

    def delay(self):
        self.library.cuda._sleep(200_000_000)

    def synchronize(self):
        self.library.cuda.synchronize()


class Cupy:
    """Operations of CuPy that the tests use."""

    def __init__(self):
        self.library = pytest.importorskip("cupy")
        self.side = self.library.cuda.Stream(non_blocking=True)
        self.spin = self.library.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long t = clock64(); while (clock64() - t < n); }",
            "spin",
        )

    def made(self, array):
        return self.library.asarray(array)

    def taken(self, tensor):
        return self.library.from_dlpack(tensor)

    def address(self, array):
        return array.data.ptr

    def values(self, array):
        return array.get()

    def on_side(self):
        return self.side

    def delay(self):
        self.spin((1,), (1,), (200_000_000,))

    def synchronize(self):
        self.library.cuda.Device().synchronize()


@pytest.fixture(scope="module")
def memory():
    memory = Memory()
    host.attach(host.Host("", print, device=memory))
    yield memory
    host.detach()


@pytest.fixture(params=[Torch, Cupy])
def framework(request, memory):
    framework = request.param()
    yield framework
    framework.synchronize()


def in_arena(memory, array):
    data = memory.allocate_device(array.nbytes)
    memory.stream.h2d(data.pointer, memoryview(array).cast("B"), array.nbytes)
    data.ready = memory.stream
    datatype = {"float32": "FP32", "uint8": "UINT8"}[array.dtype.name]
    return DeviceTensor._on_device("IN", datatype, array.shape, data)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"],
)
def test_there_and_back(framework, dtype):
    array = np.random.default_rng(1).integers(0, 2, (3, 5)).astype(dtype)
    source = framework.made(array)
    tensor = Tensor.from_dlpack("A", source)
    assert tensor.as_numpy().tolist() == array.tolist()
    back = framework.taken(tensor)
    assert framework.address(back) == framework.address(source)
    assert framework.values(back).dtype == array.dtype


def test_bf16(memory):
    torch = Torch().library
    source = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device="cuda")
    tensor = Tensor.from_dlpack("A", source)
    assert tensor._datatype == "BF16"
    assert torch.from_dlpack(tensor).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("how", ["object", "described"])
def test_work_of_a_side_stream_is_waited_for(framework, how):
    array = framework.made(np.zeros(COUNT, np.float32))
    framework.synchronize()
    with framework.on_side():
        framework.delay()
        array += 7
        if how == "described":
            interface = {
                **array.__cuda_array_interface__,
                "version": 3,
                "stream": getattr(framework.side, "cuda_stream", None) or framework.side.ptr,
            }
            tensor = Tensor.from_dlpack("A", type("D", (), {"__cuda_array_interface__": interface}))
        else:
            tensor = Tensor.from_dlpack("A", array)
    assert (tensor.as_numpy() == 7).all()


def test_a_capsule_waits_for_the_default_stream(framework):
    array = framework.made(np.zeros(COUNT, np.float32))
    framework.synchronize()
    framework.delay()
    array += 7
    capsule = array.__dlpack__()
    assert (Tensor.from_dlpack("A", capsule).as_numpy() == 7).all()


def test_a_side_stream_waits_for_the_bridge(framework, memory):
    values = np.full(64 << 20, 7, np.uint8)
    with framework.on_side():
        taken = framework.taken(in_arena(memory, values))
        result = taken + 1
    assert memory.holds(framework.address(taken))
    framework.synchronize()
    assert (framework.values(result) == 8).all()


def test_writes_of_a_side_stream_are_seen(framework, memory):
    tensor = Tensor.empty("OUT", (COUNT,), "FP32", "cuda")
    with framework.on_side():
        target = framework.taken(tensor)
        framework.delay()
        target[:] = 7
    assert (tensor.as_numpy() == 7).all()


def test_no_elements(framework):
    tensor = Tensor.from_dlpack("A", framework.made(np.zeros((0, 3), np.float32)))
    assert not tensor.is_cpu()
    assert tensor.as_numpy().shape == (0, 3)
    assert tuple(framework.taken(tensor).shape) == (0, 3)


def test_strided_arrays_are_refused(framework):
    array = framework.made(np.zeros((4, 4), np.float32))
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("A", array.T)


def test_slots_go_back_with_the_last_array(framework, memory):
    gc.collect()
    before = memory.arena.lent()
    taken = framework.taken(in_arena(memory, np.zeros(COUNT, np.float32)))
    assert memory.arena.lent() != before
    del taken
    gc.collect()
    assert memory.arena.lent() == before


def test_results_are_made_in_the_arena(framework, memory):
    if isinstance(framework, Torch) and native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    array = framework.made(np.arange(COUNT, dtype=np.float32))
    with pb_utils.device_arena():
        result = array * 2
    assert memory.holds(framework.address(result))
    assert not memory.holds(framework.address(array * 2))
    tensor = Tensor.from_dlpack("OUT", result)
    del result
    assert tensor.as_numpy().tolist()[:3] == [0, 2, 4]


def test_pytorch_asks_for_more_than_its_part(memory):
    torch = Torch().library
    if native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    with pb_utils.device_arena():
        pass
    nbytes = framework_arena._pool._data.nbytes
    with (
        pytest.raises(pb_utils.TritonModelException, match="give it more"),
        pb_utils.device_arena(),
    ):
        torch.empty(nbytes + 1, dtype=torch.uint8, device="cuda")
