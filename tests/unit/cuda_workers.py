"""Processes on a simulated machine that use `gpubridge.cuda_ipc`."""

import contextlib
from collections.abc import Iterator, Mapping

from tests.simcuda.machine import Machine
from tests.simcuda.processes import Worker, running_worker

__all__ = ["device_worker", "stub_device_worker"]

# `told` is the ordinal of the device.
_SETUP = """
import gc
from gpubridge.cuda_ipc import *
from gpubridge.errors import BridgeError

context = DeviceContext(list_devices()[told])

def pinned(nbytes):
    # Memory that copies do not stage, as the driver allocates it.
    with context.pushed():
        place = (ctypes.c_char * nbytes).from_address(ok(d.cuMemHostAlloc(nbytes, 0)))
    return memoryview(place).cast("B")

def mine(nbytes, region=1):
    return DeviceSegment.allocate(context, region, nbytes)

def put(pointer, data):
    with context.pushed():
        ok(d.cuMemcpyHtoD(pointer, data, len(data)))

def seen(pointer, nbytes=1):
    with context.pushed():
        return list(read(pointer, nbytes))

def attributes(function, *arguments):
    try:
        function(*arguments)
    except CudaError as error:
        return [error.call, error.status, error.name, error.sticky, error.code.name]

def refusal(function, *arguments):
    try:
        function(*arguments)
    except BridgeError as error:
        return [type(error).__name__, error.code.name, error.message]
"""

# Its arena is small, `whole` bytes; what it tells the server is in `closed`, `work` and `said`.
_STUB_SETUP = """
from gpubridge.cuda_ipc import find_device, list_devices
from gpubridge.stub.device.memory import StubDevice
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment
from gpubridge.transport.control import ControlPage
from gpubridge.transport.stub_settings import StubGpu
import gpubridge.stub.device.memory as memory_module, os
memory_module._ALLOCATION_SECONDS = 0.05
work = memoryview(bytearray(72)).cast("Q")
cells = ControlPage(Segment.create(0, ControlPage.SIZE)).events
cells.used[0] = 1
closed, said = [], []
ok(d.cuInit(0))
gpu = StubGpu(list_devices()[0].uuid, [], 2 << 20, os.getpid())
device = StubDevice(
    gpu, 0, work, cells, None, lambda *what: closed.append(what), lambda: None,
    lambda *what: said.append(what))
device._require().context.make_current()

class Stream(int):
    # It says which stream it is, as libraries' own objects do, and keeps it.
    def __cuda_stream__(self):
        return 0, int(self)

def new_stream():
    return Stream(ok(d.cuStreamCreate(1)))

stream = new_stream()
whole = device.capacity

def passed():
    # Streams have done what they had to do, and what they used goes back.
    for _ in range(3):
        device.reclaim()
        ok(d.cuCtxSynchronize())
    device.reclaim()

def room_for(nbytes):
    try:
        device.allocate_device(nbytes)
        return True
    except BridgeError:
        return False
"""


@contextlib.contextmanager
def device_worker(
    machine: Machine, device: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Start a process that has the context of a device, which is current nowhere."""
    with running_worker(machine, environment) as worker:
        worker.do(_SETUP, device)
        yield worker


@contextlib.contextmanager
def stub_device_worker(machine: Machine) -> Iterator[Worker]:
    """Start a process that has a GPU as a stub has it; its context is current."""
    with running_worker(machine) as worker:
        worker.do(_STUB_SETUP)
        yield worker
