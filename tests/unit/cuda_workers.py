"""Processes on a simulated machine that use `gpubridge.cuda_ipc`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from tests.simcuda.machine import Machine
from tests.simcuda.processes import Worker, running_worker

__all__ = ["device_worker"]

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


@contextlib.contextmanager
def device_worker(
    machine: Machine, device: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Start a process that has the context of a device, which is current nowhere."""
    with running_worker(machine, environment) as worker:
        worker.do(_SETUP, device)
        yield worker
