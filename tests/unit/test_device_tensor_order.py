"""Tensors on the simulated GPU: without one wait, a reader gets what was there before.

Each way in which a tensor changes hands is tried with its wait, and with that wait taken out.
"""

import pytest

from tests.simcuda.machine import lawful_machine
from tests.unit.cuda_workers import device_worker
from tests.unit.model_configs import cases

pytest.importorskip("cuda.bindings")

# `theirs` is the stream of a framework, `copies` the bridge's; `given` is 4096 bytes of a framework's
# memory, `taken` others; all are zero.
START = """
import threading
import numpy as np
from gpubridge.pb_utils import Tensor, host
from gpubridge.pb_utils.tensor import DeviceTensor
from gpubridge.tensor import dlpack
from gpubridge.tensor.device_bytes import DeviceBytes

context.make_current()
copies = CopyStream(context)
segment = mine(16384)
given, taken = segment.pointer, segment.pointer + 4096
put(segment.pointer, bytes(16384))
theirs = int(ok(d.cuStreamCreate(1)))
staged = pinned(4096)

class Memory:
    ordinal, stream = 0, copies

    def allocate_device(self, nbytes):
        return DeviceBytes(segment.pointer + 8192, nbytes, 0)

    def copy_to_host(self, data, target):
        data.order_into(copies)
        copies.d2h(staged, data.pointer, data.nbytes)
        copies.wait()
        target[:] = staged[:data.nbytes]

    def copy_on_device(self, data):
        copy = self.allocate_device(data.nbytes)
        data.order_into(copies)
        copies.d2d(copy.pointer, data.pointer, data.nbytes)
        copy.ready = copies
        return copy

host.attach(host.Host("", print, device=Memory()))

class Nothing:
    # What a bridge would wait with that forgets to.
    handle = copies.handle
    def order_before(self, stream): pass
    def order_after(self, stream): pass
    def done(self): return True
    def wait(self): pass

def wait_on(waiting, stream):
    event = ok(d.cuEventCreate(2))
    ok(d.cuEventRecord(event, stream))
    ok(d.cuStreamWaitEvent(waiting, event, 0))

class Framework:
    # A tensor of a framework whose kernel is still to write it.
    def __init__(self, stream, value):
        hold(stream)
        fill(given, value, 4096, stream)
        self.stream = stream
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, stream=None, max_version=None):
        if stream is not None and stream != -1:
            wait_on(stream, self.stream)
        return dlpack.make_capsule(self, given, "UINT8", (4096,), (2, 0), max_version,
                                   read_only=False, copied=False)

class Described:
    def __init__(self, stream, value):
        hold(stream)
        fill(given, value, 4096, stream)
        self.__cuda_array_interface__ = {"version": 3, "shape": (4096,), "typestr": "|u1",
                                         "data": (given, False), "stream": stream}

def arrived(value):
    # A tensor whose copy to the device is still to be made.
    hold(copies.handle)
    staged[:] = bytes([value]) * 4096
    copies.h2d(given, staged, 4096)
    return DeviceTensor._on_device("IN", "UINT8", (4096,), DeviceBytes(given, 4096, 0, None, copies))

def use_pytorch(*others):
    # PyTorch, on its side stream.
    import sys, types
    cuda = types.SimpleNamespace(is_initialized=lambda: True,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=theirs))
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    sys.modules.update(dict.fromkeys(others, types.SimpleNamespace()))

forgotten = False

def later():
    # Who forgets to wait is done before; the time only ends a test that fails.
    timer = threading.Timer(20 if forgotten else 0.2, released.set)
    timer.daemon = True
    timer.start()

def copied_by(stream, pointer):
    # What a kernel on a stream sees that is launched now.
    ok(d.cuMemcpyDtoDAsync(taken, pointer, 4096, stream))
    later()
    if forgotten:
        ok(d.cuStreamSynchronize(stream))
        released.set()
    ok(d.cuCtxSynchronize())
    return seen(taken)[0]

def in_numpy(tensor):
    later()
    found = int(tensor.as_numpy()[4095])
    released.set()
    ok(d.cuCtxSynchronize())
    return found
"""

#: What takes a wait out.
FORGOTTEN = {
    "wait_on": "wait_on = lambda waiting, stream: None",
    "mark": "mark = copies.mark; copies.mark = lambda other=None: Nothing() if other else mark()",
    "order_before": "copies.order_before = Nothing().order_before",
    "order_after": "copies.order_after = Nothing().order_after",
    "done": "copies.done = Nothing().done",
    "others": "from gpubridge.tensor import device_bytes; device_bytes.others_imported = bool",
}
# What changes hands in `tensor`, the wait without which it fails, and below them what is done.
EDGES = """
a framework's tensor in | wait_on
    tensor = Tensor.from_dlpack('OUT', Framework(theirs, 7)); answer = in_numpy(tensor)
a capsule in | mark
    capsule = Framework(1, 7).__dlpack__(); tensor = Tensor.from_dlpack('OUT', capsule); answer =
    in_numpy(tensor)
a described tensor in | mark
    tensor = Tensor.from_dlpack('OUT', Described(theirs, 7)); answer = in_numpy(tensor)
to a stream | order_before
    tensor = arrived(7); capsule = tensor.__dlpack__(stream=theirs); answer = copied_by(theirs, given)
to the default stream | order_before
    tensor = arrived(7); capsule = tensor.__dlpack__(); answer = copied_by(1, given)
to a stream of one that describes | order_before
    tensor = arrived(7); wait_on(theirs, tensor.__cuda_array_interface__['stream']); answer =
    copied_by(theirs, given)
a bare capsule to a side stream | done
    tensor = arrived(7); later(); capsule = tensor.to_dlpack(); answer = copied_by(theirs, given)
a bare capsule of a framework's side stream in | mark
    use_pytorch(); capsule = Framework(theirs, 7).__dlpack__(); tensor = Tensor.from_dlpack('OUT', capsule);
    answer = in_numpy(tensor)
a bare capsule to a framework's side stream | order_before
    use_pytorch(); tensor = arrived(7); capsule = tensor.to_dlpack(); answer = copied_by(theirs, given)
a bare capsule to another library's stream | others
    use_pytorch('jax'); others = int(ok(d.cuStreamCreate(1))); tensor = arrived(7); later(); capsule =
    tensor.to_dlpack(); answer = copied_by(others, given)
a framework's work on a bare capsule | order_after
    use_pytorch(); tensor = Tensor.empty('OUT', (4096,), 'UINT8', 'cuda'); capsule = tensor.to_dlpack();
    hold(theirs); fill(segment.pointer + 8192, 7, 4096, theirs); answer = in_numpy(tensor)
a copy to a stream | order_before
    tensor = arrived(7); capsule = tensor.__dlpack__(stream=theirs, copy=True); answer = copied_by(theirs,
    segment.pointer + 8192)
back from a stream | order_after
    tensor = Tensor.empty('OUT', (4096,), 'UINT8', 'cuda'); capsule = tensor.__dlpack__(stream=theirs);
    hold(theirs); fill(segment.pointer + 8192, 7, 4096, theirs); answer = in_numpy(tensor)
back from the default stream | order_after
    tensor = Tensor.empty('OUT', (4096,), 'UINT8', 'cuda'); capsule = tensor.to_dlpack(); hold(1);
    fill(segment.pointer + 8192, 7, 4096, 1); answer = in_numpy(tensor)
"""


@pytest.fixture(scope="module")
def machine():
    with lawful_machine() as machine:
        yield machine


@pytest.mark.parametrize(("edge", "pass_on"), cases(EDGES))
@pytest.mark.parametrize("waits", [True, False], ids=["with the wait", "without it"])
def test_order(machine, edge, pass_on, waits):
    with device_worker(machine) as worker:
        worker.do(START)
        if not waits:
            worker.do("forgotten = True")
            worker.do(FORGOTTEN[edge.partition(" | ")[2]])
        assert worker.do(pass_on) == (7 if waits else 0)


# As CuPy's, a stream goes with its object; `current` is the one that a model works on.
OWN_STREAM = """
import sys, types

class OwnStream:
    def __init__(self):
        self.ptr = int(ok(d.cuStreamCreate(1)))
    def __del__(self):
        ok(d.cuStreamDestroy(self.ptr))

sys.modules["cupy"] = types.ModuleType("cupy")
sys.modules["cupy"].cuda = types.SimpleNamespace(get_current_stream=lambda device: current)
current = OwnStream()
"""


def test_a_stream_that_its_library_lets_go_of_is_still_waited_for(machine):
    with device_worker(machine) as worker:
        worker.do(START + OWN_STREAM)
        worker.do("data = DeviceBytes(given, 4096, 0); data.hand_out(current.ptr)")
        worker.do("hold(current.ptr); fill(given, 7, 4096, current.ptr)")
        # Were it destroyed, the next one would have its handle, and nothing to wait for.
        worker.do("current = None; gc.collect(); current = OwnStream()")
        worker.do(
            "data.order_into(copies); copies.d2h(staged, given, 4096); fill(taken, 1, 1, theirs)"
        )
        worker.do("ok(d.cuStreamSynchronize(theirs)); ok(d.cuStreamSynchronize(current.ptr))")
        worker.do("released.set(); copies.wait(); answer = 0")
        assert worker.do("answer = staged[0]") == 7
        worker.do("data = current = None; gc.collect()")
        assert len(machine.calls("cuStreamDestroy", worker.pid)) == 2
