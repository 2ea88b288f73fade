"""A client with memory on a GPU: a process of its own that knows nothing but the driver."""

import base64
import uuid
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tests.simcuda.processes import running_worker

POISON = 0xA5
"""Contents of memory before it is written."""

_PROGRAM = """
import base64
contexts = {}

def on(device):
    if device not in contexts:
        ok(d.cuInit(0))
        contexts[device] = ok(d.cuDevicePrimaryCtxRetain(device))
    ok(d.cuCtxSetCurrent(contexts[device]))

def look(device):
    ok(d.cuInit(0))
    return ok(d.cuDeviceGetCount())
"""


@dataclass(frozen=True)
class DeviceRegion:
    """A client's memory on a GPU."""

    name: str
    device: int
    pointer: int
    nbytes: int
    handle: bytes


class DeviceClient:
    """A client's operations on its memory, which this process never sees."""

    def __init__(self, worker):
        self._worker = worker
        self._worker.do(_PROGRAM)

    def devices(self):
        """Count the GPUs."""
        return self._worker.do("answer = look(0)")

    def allocate(self, nbytes, device=0):
        """Allocate memory, poisoned, that others may open."""
        pointer, handle = self._worker.do(
            "on(told[0]); p = int(ok(d.cuMemAlloc(told[1]))); h = ok(d.cuIpcGetMemHandle(p)); "
            "answer = [p, raw(h)]",
            [device, nbytes],
        )
        region = DeviceRegion(uuid.uuid4().hex, device, pointer, nbytes, bytes(handle))
        self.poison(region)
        return region

    def poison(self, region):
        """Fill the memory with what no answer is."""
        self._worker.do(
            "on(told[0]); ok(d.cuMemsetD8(told[1], told[2], told[3])); ok(d.cuCtxSynchronize())",
            [region.device, region.pointer, POISON, region.nbytes],
        )

    def write(self, region, values, offset=0):
        """Write an array's bytes."""
        data = np.ascontiguousarray(values).tobytes()
        self._worker.do(
            "on(told[0]); data = base64.b64decode(told[2]); "
            "ok(d.cuMemcpyHtoD(told[1], data, len(data)))",
            [region.device, region.pointer + offset, base64.b64encode(data).decode()],
        )

    def read(self, region, dtype=np.float32, nbytes=None, offset=0):
        """Read an array's bytes."""
        text = self._worker.do(
            "on(told[0]); answer = base64.b64encode(read(told[1], told[2])).decode()",
            [region.device, region.pointer + offset, region.nbytes if nbytes is None else nbytes],
        )
        return np.frombuffer(base64.b64decode(text), dtype)

    def free(self, region):
        """Free the memory."""
        self._worker.do(
            "on(told[0]); ok(d.cuMemFree(told[1]))",
            [region.device, region.pointer],
        )

    def die(self):
        """Kill the process, with all that it has on the GPUs."""
        self._worker.kill()


@contextmanager
def running_client(machine):
    """Give a client's process."""
    with running_worker(machine) as worker:
        yield DeviceClient(worker)


def register(protocol_client, region, *, name=None, nbytes=None, device=None):
    """Register a region as tritonclient does."""
    protocol_client.register_cuda_shared_memory(
        name or region.name,
        base64.b64encode(region.handle),
        region.device if device is None else device,
        region.nbytes if nbytes is None else nbytes,
    )


@contextmanager
def registered(client, protocol_client, *sizes, device=0):
    """Allocate and register regions of some sizes; gives them."""
    regions = [client.allocate(nbytes, device) for nbytes in sizes]
    try:
        for region in regions:
            register(protocol_client, region)
        yield regions
    finally:
        for region in regions:
            protocol_client.unregister_cuda_shared_memory(region.name)
            client.free(region)


def wanted(library, source, target=None, datatype="FP32"):
    """Make the inputs and outputs of a request whose tensors are in regions."""
    width = {"FP32": 4, "FP16": 2, "BF16": 2, "BOOL": 1}[datatype]
    given = library.InferInput("IN", [source.nbytes // width], datatype)
    given.set_shared_memory(source.name, source.nbytes)
    if target is None:
        return [given], None
    output = library.InferRequestedOutput("OUT")
    output.set_shared_memory(target.name, target.nbytes)
    return [given], [output]
