"""device_arena(): frameworks that make their results where they need not be copied.

PyTorch and CuPy are stand-ins here that ask for memory as the real ones do: no GPU has seen this.
"""

import contextlib
import ctypes
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import framework_arena, host
from gpubridge.tensor import native
from tests.unit.device_doubles import MODEL_STREAM, Memory

MB = 1 << 20
Failure = pb_utils.TritonModelException


@pytest.fixture
def log():
    return []


@pytest.fixture
def memory(log, monkeypatch):
    monkeypatch.setattr(framework_arena, "_pool", None)
    monkeypatch.setattr(framework_arena, "_refused", False)
    memory = Memory()
    host.attach(host.Host("/models/m/1", lambda level, text, *_: log.append(text), device=memory))
    yield memory
    host.detach()
    compiled = native.native()
    if compiled is not None:
        compiled.arena_set(0, 0)


class OutOfMemoryError(RuntimeError):
    """PyTorch's exception."""


class Functions:
    """An allocator of PyTorch's."""

    def __init__(self, take, give):
        self.take, self.give = take, give


class Tensor:
    """A tensor of PyTorch's."""

    def __init__(self, pointer, free):
        self.data_ptr = lambda: pointer
        self._free = free

    def __del__(self):
        self._free()


class Torch:
    """PyTorch, as far as it makes memory: its allocator calls two functions of a library."""

    __version__ = "2.9.0"
    OutOfMemoryError = OutOfMemoryError
    uint8 = "uint8"

    def __init__(self, available=True):
        self.pools = 0
        # What it does in a pool with `expandable_segments`: refuse, or make tensors elsewhere.
        self.expandable = None
        self._active = threading.local()

        def allocator(path, malloc, free):
            library = ctypes.CDLL(path)
            take, give = getattr(library, malloc), getattr(library, free)
            take.restype = ctypes.c_void_p
            take.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            give.restype = None
            give.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            functions = Functions(take, give)
            return SimpleNamespace(allocator=lambda: functions)

        def pool(functions):
            self.pools += 1
            # As PyTorch's, it does not keep its allocator.
            return weakref.ref(functions)

        @contextlib.contextmanager
        def use_mem_pool(functions, device):
            self._active.functions, self._active.device = functions(), device
            try:
                yield
            finally:
                self._active.functions = None

        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            memory=SimpleNamespace(CUDAPluggableAllocator=allocator),
            MemPool=pool,
            use_mem_pool=use_mem_pool,
        )

    def empty(self, nbytes, dtype=None, device=None):
        functions = getattr(self._active, "functions", None)
        if functions is None:
            return None
        if self.expandable == "refuses":
            raise RuntimeError("torch.cuda.MemPool doesn't currently support expandable_segments.")
        if self.expandable is not None:
            return SimpleNamespace(data_ptr=lambda: 1 << 46)
        if dtype is not None:
            return Tensor(*self.empty(nbytes))
        pointer = functions.take(nbytes, self._active.device, MODEL_STREAM)
        if not pointer:
            raise OutOfMemoryError("CUDA out of memory")
        return pointer, lambda: functions.give(pointer, nbytes, 0, MODEL_STREAM)


class Cupy:
    """CuPy, as far as it makes memory: through a function that it is given."""

    def __init__(self, device=0, stream=MODEL_STREAM):
        self.allocate = None
        self._device = device

        @contextlib.contextmanager
        def using_allocator(function):
            self.allocate = function
            yield
            self.allocate = None

        self.cuda = SimpleNamespace(
            using_allocator=using_allocator,
            Device=lambda: SimpleNamespace(id=self._device),
            get_current_stream=lambda device=-1: SimpleNamespace(ptr=stream),
            UnownedMemory=lambda *fields: fields,
            MemoryPointer=lambda memory, offset: (memory, offset),
        )

    def get_default_memory_pool(self):
        return SimpleNamespace(malloc=lambda size: ("own", size))


@pytest.fixture
def torch(monkeypatch):
    if native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    torch = Torch()
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def cupy(monkeypatch):
    cupy = Cupy()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


@pytest.mark.parametrize("served", [True, False])
def test_without_a_gpu_nobody_is_asked(monkeypatch, served):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    if served:
        host.attach(host.Host("/models/m/1", print))
    with pb_utils.device_arena():
        pass
    host.detach()


def test_frameworks_that_are_not_imported_are_not_asked(memory, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    before = set(sys.modules)
    with pb_utils.device_arena():
        assert set(sys.modules) == before


def test_the_reserve_is_a_number(memory):
    for reserve in (0, -1, "1", None):
        with pytest.raises(TypeError, match="expected int of 1 or more for reserve"):
            pb_utils.device_arena(reserve).__enter__()


def test_pytorchs_tensors_lie_in_the_arena(memory, torch):
    assert torch.empty(100) is None
    with pb_utils.device_arena(reserve=MB):
        pointer, free = torch.empty(1000)
        data = framework_arena._pool._data
        assert data.pointer <= pointer
        assert pointer + 1000 <= data.pointer + MB
        assert pointer % 512 == 0
    assert torch.empty(100) is None
    # The tensor outlives the block.
    free()


def test_threads_share_the_pool(memory, torch):
    found = []

    def make():
        with pb_utils.device_arena(reserve=MB):
            found.append(torch.empty(5000)[0])

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(make) for _ in range(8)]:
            each.result()
    assert torch.pools == 1
    assert len(set(found)) == 8
    assert all(abs(a - b) >= 5000 for a in found for b in found if a != b)


def test_freed_ranges_are_merged(memory, torch):
    with pb_utils.device_arena(reserve=MB):
        usable = MB - 512
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
            made = [torch.empty(usable // 4) for _ in range(3)]
            for index in order:
                made[index][1]()
            whole = torch.empty(usable - usable % 512)
            whole[1]()
        compiled = native.native()
        assert compiled.arena_state() == (0, 0)


def test_threads_take_and_give_at_once(memory, torch):
    def use():
        with pb_utils.device_arena(reserve=MB):
            for _ in range(3000):
                made = [torch.empty(700) for _ in range(3)]
                assert len({pointer for pointer, _ in made}) == 3
                for _, free in made:
                    free()

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(use) for _ in range(4)]:
            each.result()
    assert native.native().arena_state() == (0, 0)
    with pb_utils.device_arena():
        assert torch.empty(MB - 512 - (MB - 512) % 512)


def test_memory_of_nobodys_is_not_taken_back(memory, torch):
    with pb_utils.device_arena(reserve=MB):
        pointer, free = torch.empty(1000)
        free()
        free()
        assert torch.empty(1000)[0] == pointer
        assert torch.empty(1000)[0] != pointer


def test_more_than_there_is(memory, torch):
    text = "asked for 2097152 bytes more, 1024 of the 1048576"
    with pb_utils.device_arena(reserve=MB):
        torch.empty(1000)
    with pytest.raises(Failure, match=text) as caught, pb_utils.device_arena():
        torch.empty(2 * MB)
    assert isinstance(caught.value.__cause__, OutOfMemoryError)
    with pytest.raises(OutOfMemoryError), pb_utils.device_arena():
        raise OutOfMemoryError("of another pool")
    with pytest.raises(ValueError, match="the model's own"), pb_utils.device_arena():
        raise ValueError("the model's own")


def test_an_arena_that_cannot_spare_the_reserve(memory, torch):
    memory.failure = BridgeError("device memory arena is full", ErrorCode.UNAVAILABLE)
    with pytest.raises(Failure, match=r"^device memory arena is full$"):
        pb_utils.device_arena().__enter__()
    memory.failure = None
    with pb_utils.device_arena(reserve=MB):
        assert torch.empty(10)


def test_memory_is_given_without_the_interpreters_lock(memory, torch):
    """PyTorch asks under a lock of its own, for which threads wait that have the interpreter's."""
    with pb_utils.device_arena(reserve=MB):
        library = ctypes.CDLL(native.native_path())
    pointer = ctypes.c_void_p
    # PyDLL keeps the interpreter's lock: this thread has it while it waits for the other.
    libc = ctypes.PyDLL(None)
    libc.pthread_create.argtypes = [pointer, pointer, pointer, pointer]
    libc.pthread_join.argtypes = [ctypes.c_ulong, pointer]
    for function in (library.gpubridge_arena_malloc, library.gpubridge_arena_free):
        thread, result = ctypes.c_ulong(), pointer()
        start = ctypes.cast(function, pointer)
        assert libc.pthread_create(ctypes.byref(thread), None, start, 1000) == 0
        assert libc.pthread_join(thread, ctypes.byref(result)) == 0
        if function is library.gpubridge_arena_malloc:
            assert result.value


@pytest.mark.parametrize("what", ["old", "cpu", "python"])
def test_pytorch_without_support_is_reported_once(what, memory, log, monkeypatch):
    torch = Torch(available=what != "cpu")
    if what == "old":
        torch.__version__ = "2.4.1"
        del torch.cuda.use_mem_pool
    if what == "python":
        monkeypatch.setattr(framework_arena, "absence", lambda: "it was turned off")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if what != "python" and native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    for _ in range(2):
        with pb_utils.device_arena():
            assert torch.empty(1) is None
    reason = {"old": "PyTorch 2.4.1 has no", "cpu": "has no CUDA", "python": "it was turned off"}
    assert len(log) == 1
    assert reason[what] in log[0]


@pytest.mark.parametrize("expandable", ["refuses", "elsewhere"])
def test_with_expandable_segments_it_is_tried_once(expandable, memory, torch, log):
    torch.expandable = expandable
    for _ in range(3):
        with pb_utils.device_arena(reserve=MB):
            # Not in the pool any more, where that would fail the request.
            assert torch.empty(1) is None
    assert torch.pools == 1
    assert len(log) == 1
    assert "PyTorch 2.9.0 does not use its pool: " in log[0]
    assert "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF" in log[0]
    assert ("MemPool doesn't currently support" in log[0]) == (expandable == "refuses")


def test_a_reserve_that_is_too_small_to_try_is_used_all_the_same(memory, torch, log):
    for _ in range(2):
        with pytest.raises(Failure, match="asked for"), pb_utils.device_arena(reserve=1):
            torch.empty(1)
    assert torch.pools == 1
    assert log == []


def test_cupys_arrays_lie_in_the_arena(memory, cupy):
    with pb_utils.device_arena():
        (pointer, size, data, device), offset = cupy.allocate(1000)
    assert cupy.allocate is None
    assert (pointer, size, device, offset) == (data.pointer, 1000, 0, 0)
    assert data.owner.address == pointer
    # Its slot goes back when that stream has passed.
    assert set(data.streams) == {MODEL_STREAM}


def test_cupys_default_stream(memory, monkeypatch):
    cupy = Cupy(stream=0)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pb_utils.device_arena():
        assert set(cupy.allocate(4)[0][2].streams) == {1}


def test_cupys_empty_arrays(memory, cupy):
    memory.failure = BridgeError("the arena was asked")
    with pb_utils.device_arena():
        assert cupy.allocate(0) == ((0, 0, None, 0), 0)


def test_cupys_arrays_on_other_devices(memory, cupy):
    cupy._device = 1
    with pb_utils.device_arena():
        assert cupy.allocate(10) == ("own", 10)


def test_cupy_in_a_full_arena(memory, cupy):
    memory.failure = BridgeError("device memory arena is full", ErrorCode.UNAVAILABLE)
    with pb_utils.device_arena(), pytest.raises(Failure, match="arena is full"):
        cupy.allocate(10)
