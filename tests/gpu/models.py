"""Models for a GPU: the same behaviour by the driver alone, by PyTorch and by CuPy.

Each library's part has ``begin(device)``, ``take(tensor)`` (the tensor in the library's terms, on the
GPU), ``double(x)`` (new memory of the library, written on a stream of its own, poisoned before),
``fill(tensor, x)`` (twice x into a tensor of the bridge), ``give(name, x)`` and ``same(x)`` (a copy).
"""

from tests.process.device_models import LIBRARY, write_device_model
from tests.waits import polling

_DRIVER = """
def begin(device):
    global library
    library = Library({"model_instance_device_id": device})


def linger():
    # What follows on the library's stream comes seconds later.
    library.launch(lambda: time.sleep(5))


def shape_of(x):
    shape = getattr(x, "shape", None)
    return tuple(shape() if callable(shape) else x.__cuda_array_interface__["shape"])


def take(tensor):
    if not tensor.is_cpu():
        return tensor
    staged = library.array("staged " + tensor.name(), tensor.shape())
    values = np.ascontiguousarray(tensor.as_numpy())
    ok(d.cuMemcpyHtoD(staged.__cuda_array_interface__["data"][0], values, values.nbytes))
    return staged


def double(x):
    shape = shape_of(x)
    count = int(np.prod(shape))
    # Of three, so that it is never what x is, nor what is still being sent.
    library.turn = (getattr(library, "turn", 0) + 1) % 3
    out = library.array(f"out {library.turn}", shape)
    pointer = out.__cuda_array_interface__["data"][0]
    if count:
        ok(d.cuMemsetD8Async(pointer, 0xA5, 4 * count, library.stream))
        library.double(library.pointer(x), pointer, count)
    return out


def fill(tensor, x):
    count = int(np.prod(shape_of(x)))
    if count:
        library.double(library.pointer(x), library.pointer(tensor), count)
    # The CUDA array interface does not tell on which stream its data is written.
    ok(d.cuStreamSynchronize(library.stream))


def give(name, x):
    return pb_utils.Tensor.from_dlpack(name, x)


# Stores to an address that is nobody's; any GPU's driver compiles it.
_PTX = b'''.version 7.0
.target sm_52
.address_size 64
.visible .entry stray() {
    .reg .u64 %a; .reg .u32 %v;
    mov.u64 %a, 64; mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
\\0'''


def stray():
    module = ok(d.cuModuleLoadData(_PTX))
    kernel = ok(d.cuModuleGetFunction(module, b"stray"))
    ok(d.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, library.stream, 0, 0))
"""

_TORCH = """
import json, os, time
import numpy as np
import torch
import triton_python_backend_utils as pb_utils


def begin(device):
    global side, here
    here = torch.device("cuda", device)
    side = torch.cuda.Stream(here)


def linger():
    torch.cuda._sleep(10_000_000_000)  # on the default stream, some seconds


def take(tensor):
    x = torch.from_dlpack(tensor)
    assert x.is_cuda == (not tensor.is_cpu())
    return x if x.is_cuda else x.to(here)


def double(x):
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream(here))
        out = torch.full_like(x, float("nan"))
        torch.cuda._sleep(2_000_000)  # what is read too early is poison
        torch.mul(x, 2, out=out)
        out.record_stream(torch.cuda.default_stream(here))
    torch.cuda.default_stream(here).wait_stream(side)
    return out


def fill(tensor, x):
    torch.mul(x, 2, out=torch.from_dlpack(tensor))


def give(name, x):
    return pb_utils.Tensor.from_dlpack(name, x)


def stray():
    source = torch.zeros(4, device=here)
    source[torch.full((1,), 1 << 40, device=here)]
"""

_CUPY = """
import json, os, time
import cupy
import numpy as np
import triton_python_backend_utils as pb_utils

_SLEEP = r'''extern "C" __global__ void nap(long long n) {
    long long t = clock64(); while (clock64() - t < n) {}
}'''
_STRAY = r'''extern "C" __global__ void stray() { *(volatile int*)64 = 1; }'''


def begin(device):
    global side, nap
    cupy.cuda.Device(device).use()
    side = cupy.cuda.Stream(non_blocking=True)
    nap = cupy.RawKernel(_SLEEP, "nap")


def linger():
    nap((1,), (1,), (10_000_000_000,))


def take(tensor):
    return cupy.asarray(tensor.as_numpy()) if tensor.is_cpu() else cupy.from_dlpack(tensor)


def double(x):
    side.wait_event(cupy.cuda.get_current_stream().record())
    with side:
        out = cupy.full_like(x, cupy.nan)
        nap((1,), (1,), (2_000_000,))  # what is read too early is poison
        cupy.multiply(x, cupy.float32(2), out=out)
    cupy.cuda.get_current_stream().wait_event(side.record())
    return out


def fill(tensor, x):
    cupy.multiply(x, cupy.float32(2), out=cupy.from_dlpack(tensor))


def give(name, x):
    return pb_utils.Tensor.from_dlpack(name, x)


def stray():
    cupy.RawKernel(_STRAY, "stray")((1,), (1,), ())
"""

_PRELUDES = {"driver": LIBRARY + "import json\n" + _DRIVER, "torch": _TORCH, "cupy": _CUPY}

# Does what the request's parameter `do` says; answers twice its input, but for "passed" (the same) and
# "call" (four times).
_LAB = """
import threading


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        begin(int(args["model_instance_device_id"]))
        self.held = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = json.loads(request.parameters() or "{}")
        (given,) = [t for t in request.inputs() if t.name() == "IN"]
        out = getattr(self, "do_" + told.get("do", "double"))(request, given)
        return pb_utils.InferenceResponse([out])

    def do_double(self, request, given):
        return give("OUT", double(take(given)))

    def do_kept(self, request, given):
        out = pb_utils.Tensor.empty("OUT", given.shape(), np.float32, "cuda")
        fill(out, take(given))
        return out

    def do_final(self, request, given):
        out = request.output("OUT", given.shape(), np.float32, "cuda")
        fill(out, take(given))
        return out

    def do_passed(self, request, given):
        assert not given.is_cpu(), given.device
        return give("OUT", given)

    def do_host(self, request, given):
        assert not given.is_cpu(), given.device
        return pb_utils.Tensor("OUT", 2 * given.as_numpy())

    def do_born(self, request, given):
        with pb_utils.device_arena(reserve=8 << 20):
            out = double(take(given))
        return give("OUT", out)

    def do_call(self, request, given):
        told = json.loads(request.parameters())
        call = pb_utils.InferenceRequest(
            model_name=told["member"], requested_output_names=["OUT"],
            inputs=[give("IN", double(take(given)))])
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        (out,) = answer.output_tensors()
        assert not out.is_cpu(), out.device
        return give("OUT", out)

    def do_stray(self, request, given):
        stray()
        return self.do_double(request, given)

    def do_hold(self, request, given):
        count = json.loads(request.parameters())["count"]
        self.held = [pb_utils.Tensor.empty("HELD", [count], np.float32, "cuda")] if count else []
        return self.do_double(request, given)

    def do_doomed(self, request, given):
        # Answers with what is long in coming, and dies before it is there.
        if json.loads(request.parameters())["doomed"] != self.args["model_name"]:
            return self.do_double(request, given)
        x = take(given)
        linger()
        threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
        return give("OUT", double(x))

    def do_die(self, request, given):
        self.held = [take(given), pb_utils.Tensor.empty("HELD", [1 << 16], np.float32, "cuda")]
        os.kill(os.getpid(), 9)
"""

_STREAM = """

class TritonPythonModel:
    def initialize(self, args):
        begin(int(args["model_instance_device_id"]))

    def execute(self, requests):
        for request in requests:
            x, sender = take(request.inputs()[0]), request.get_response_sender()
            for _ in range(5):
                x = double(x)
                sender.send(pb_utils.InferenceResponse([give("OUT", x)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_PATIENT = """
from gpubridge.pb_utils import host

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def note(name, what):
    with open(os.path.join(HERE, name), "a") as file:
        file.write(what)


def size(name):
    path = os.path.join(HERE, name)
    return os.path.getsize(path) if os.path.exists(path) else 0


class TritonPythonModel:
    def initialize(self, args):
        begin(int(args["model_instance_device_id"]))

    def execute(self, requests):
        note("begun", "x")
        number = size("begun")
        UNTIL_PERMITTED
        uploads = host.current().device.uploads.stream
        until = time.monotonic() + 20
        UNTIL_UPLOADED
        note("seen", f"{uploads.counts.copies['h2d']}:{uploads.done()} ")
        return [
            pb_utils.InferenceResponse([give("OUT", double(take(request.inputs()[0])))])
            for request in requests
        ]
"""
_PATIENT = _PATIENT.replace(
    "UNTIL_PERMITTED",
    polling("size('permits') >= number or not os.path.exists(os.path.join(HERE, 'hold'))"),
).replace("UNTIL_UPLOADED", polling("uploads.done() or time.monotonic() > until"))

_PLACED = 'parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }'


def write_lab(repository, library, name="lab", **options):
    """Write a laboratory: its input is on the GPU, wherever it came from."""
    config = f"{_PLACED}\n{options.pop('config', '')}"
    return write_device_model(repository, name, _PRELUDES[library] + _LAB, config=config, **options)


def write_member(repository, library, name="member", **options):
    """Write what calls and ensembles use: a model that takes its input where it is, and doubles it."""
    return write_device_model(repository, name, _PRELUDES[library] + _LAB, **options)


def write_stream(repository, library, name="stream", **options):
    """Write a decoupled model with five answers, each twice the one before."""
    config = f"{_PLACED}\nmodel_transaction_policy {{ decoupled: true }}"
    source = _PRELUDES[library] + _STREAM
    return write_device_model(repository, name, source, config=config, **options)


def write_patient(repository, library, name="patient", **options):
    """Write a model that waits for permits, and says what it has seen of uploads when it got one."""
    source = _PRELUDES[library] + _PATIENT
    return write_device_model(repository, name, source, config=_PLACED, **options)
