"""Devices, streams and memory of CuPy's double."""

import collections
import contextlib
import functools
import threading

from cuda.bindings import driver

_CUDA_NON_BLOCKING = 1
_local = threading.local()


def ok(answer):
    """Return what a call of the driver answered."""
    assert int(answer[0]) == 0, answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]


def order(first, then):
    """Let a stream wait for what is on another one by now."""
    if first == then:
        return
    event = ok(driver.cuEventCreate(2))
    ok(driver.cuEventRecord(event, first))
    ok(driver.cuStreamWaitEvent(then, event, 0))
    ok(driver.cuEventDestroy(event))


@functools.cache
def _primary_context(device):
    # The runtime never gives it back.
    return ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(device))))


class Device:
    """A device; in a block, the thread's."""

    def __init__(self, device=None):
        self.id = int(ok(driver.cuCtxGetDevice())) if device is None else device
        self._before = []

    def __enter__(self):
        ok(driver.cuInit(0))
        self._before.append(ok(driver.cuCtxGetCurrent()))
        ok(driver.cuCtxSetCurrent(_primary_context(self.id)))
        return self

    def __exit__(self, *_):
        before = self._before.pop()
        # Once the runtime has a device in a thread, it always has one.
        if int(before):
            ok(driver.cuCtxSetCurrent(before))


class Stream:
    """A stream; in a block, the thread's current one."""

    def __init__(self, non_blocking=False):
        self.device_id = Device().id
        self.ptr = int(ok(driver.cuStreamCreate(_CUDA_NON_BLOCKING if non_blocking else 0)))
        self.staged = {}
        # Arguments of kernels, for long enough.
        self.launched = collections.deque(maxlen=10_000)

    def __enter__(self):
        _streams().append(self)
        return self

    def __exit__(self, *_):
        assert _streams().pop() is self

    def synchronize(self):
        ok(driver.cuStreamSynchronize(self.ptr))

    def staging(self, number, nbytes):
        """Return pinned memory for an argument of a launch: in its order, others may have it next."""
        key = number, max(nbytes, 1)
        if key not in self.staged:
            self.staged[key] = int(ok(driver.cuMemHostAlloc(key[1], 0)))
        return self.staged[key]


class _LegacyStream(Stream):
    def __init__(self, device_id):
        self.device_id, self.ptr = device_id, 0
        self.staged, self.launched = {}, collections.deque(maxlen=10_000)


def _streams():
    if not hasattr(_local, "streams"):
        _local.streams = []
        _local.allocators = []
    return _local.streams


def get_current_stream(device_id=-1):
    """Return the thread's current stream on a device."""
    wanted = Device().id if device_id < 0 else device_id
    entered = [stream for stream in _streams() if stream.device_id == wanted]
    return entered[-1] if entered else _legacy(wanted)


@functools.cache
def _legacy(device_id):
    return _LegacyStream(device_id)


class UnownedMemory:
    """Memory that another library owns, or the double itself."""

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner
        self.device_id = Device().id if device_id < 0 else device_id


class MemoryPointer:
    """A place in memory, which it keeps."""

    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def moved(self, nbytes):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + nbytes)


class _Block:
    """Memory of the pool's: given back when nothing works on it any more."""

    def __init__(self, nbytes, stream):
        self.pointer = int(ok(driver.cuMemAlloc(max(nbytes, 1))))
        self.stream = stream
        self.context = ok(driver.cuCtxGetCurrent())

    def __del__(self):
        ok(driver.cuCtxPushCurrent(self.context))
        self.stream.synchronize()
        ok(driver.cuMemFree(self.pointer))
        ok(driver.cuCtxPopCurrent())


def malloc(nbytes):
    """Return memory of the double's own."""
    block = _Block(nbytes, get_current_stream())
    return MemoryPointer(UnownedMemory(block.pointer, nbytes, block), 0)


@contextlib.contextmanager
def using_allocator(allocator):
    """Have the thread's arrays made by another allocator."""
    _streams()
    _local.allocators.append(allocator)
    try:
        yield
    finally:
        _local.allocators.pop()


def allocate(nbytes):
    """Return memory by the thread's allocator."""
    _streams()
    return (_local.allocators[-1] if _local.allocators else malloc)(nbytes)
