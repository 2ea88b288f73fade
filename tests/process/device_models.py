"""Models for the simulated GPU, and a server with them: kernels are host functions on a stream."""

import json
import os
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from gpubridge.host_shm import Segment
from gpubridge.transport.control import ControlPage
from tests.process.server import running_server, start_server, wait_until, write_model
from tests.simcuda.machine import make_machine
from tests.waits import poll

# What a model's own library would do: memory of its own, a stream of its own, work on it.
LIBRARY = """
import ctypes, os, fcntl, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils
from cuda.bindings import driver as d


def ok(answer):
    assert int(answer[0]) == 0, answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]


class Array:
    # What a library shows of its memory.
    def __init__(self, pointer, shape, dtype, stream):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": tuple(shape), "typestr": np.dtype(dtype).str,
            "data": (pointer, False), "strides": None, "stream": stream,
        }


class Stream(int):
    # It says which stream it is, as libraries' own objects do, and keeps it.
    def __cuda_stream__(self):
        return 0, int(self)


class Library:
    def __init__(self, args=None):
        # As frameworks do: the primary context, which the bridge's work is in, too.
        number = int(args["model_instance_device_id"]) if args else 0
        ok(d.cuInit(0))
        ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(number))))))
        self.stream = Stream(ok(d.cuStreamCreate(1)))
        self.memory = {}
        self.launched = []

    def array(self, key, shape, dtype=np.float32):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self.memory.get(key, (0, -1))[1] < nbytes:
            self.memory[key] = int(ok(d.cuMemAlloc(max(nbytes, 1)))), nbytes
        return Array(self.memory[key][0], shape, dtype, self.stream)

    def pointer(self, tensor):
        # A consumer takes its stream along, as DLPack wants it.
        interface = tensor.__cuda_array_interface__
        if interface["stream"] not in (None, self.stream):
            event = ok(d.cuEventCreate(2))
            ok(d.cuEventRecord(event, interface["stream"]))
            ok(d.cuStreamWaitEvent(self.stream, event, 0))
        return interface["data"][0]

    def launch(self, work):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: work())
        self.launched.append(function)
        ok(d.cuLaunchHostFunc(self.stream, ctypes.cast(function, ctypes.c_void_p).value, 0))

    def double(self, source, target, count):
        # A kernel: it sees what is in memory when the stream comes to it. Nobody can see simulated
        # memory but the driver, so it works on a copy.
        nbytes = 4 * count
        key = "kernel", nbytes
        if key not in self.memory:
            self.memory[key] = int(ok(d.cuMemHostAlloc(nbytes, 0))), nbytes
        copy = self.memory[key][0]
        values = np.frombuffer((ctypes.c_char * nbytes).from_address(copy), np.float32)
        ok(d.cuMemcpyDtoHAsync(copy, source, nbytes, self.stream))
        self.launch(lambda: values.__imul__(2))
        ok(d.cuMemcpyHtoDAsync(target, copy, nbytes, self.stream))


def current_device():
    return int(ok(d.cuCtxGetDevice()))
"""


def on_device(answer, initialize=""):
    """Return the source of a model with a ``library``, which answers a request with what ``answer`` returns.

    That code sees the ``request``, and its first input as ``given``; it returns the output.
    """
    indented = (textwrap.indent(code.strip("\n"), " " * 8) for code in (initialize, answer))
    return LIBRARY + _MODEL.format(*indented)


_MODEL = """

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.library = Library(args)
{}

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([self.answer(each, each.inputs()[0], self.library)])
            for each in requests
        ]

    def answer(self, request, given, library):
{}
"""

# Doubles its input on the GPU, wherever that comes from, in memory of its own library.
DOUBLE = (
    LIBRARY
    + """

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.library = Library(args)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        library = self.library
        (given,) = [t for t in request.inputs() if t.name() == "IN"]
        count = int(np.prod(given.shape()))
        if given.is_cpu():
            staged = library.array("staged", given.shape())
            pointer = staged.__cuda_array_interface__["data"][0]
            values = np.ascontiguousarray(given.as_numpy())
            ok(d.cuMemcpyHtoD(pointer, values, values.nbytes))
        else:
            pointer = library.pointer(given)
        out = library.array("out", given.shape())
        library.double(pointer, out.__cuda_array_interface__["data"][0], count)
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", out)])
"""
)

# Says where it runs and where its input is.
WHERE = (
    LIBRARY
    + """

class TritonPythonModel:
    def initialize(self, args):
        self.library = Library(args)
        self.device = current_device()
        self.args = args

    def execute(self, requests):
        time.sleep(0.1)
        said = [self.args["model_instance_kind"], self.args["model_instance_device_id"],
                self.args["model_instance_name"], str(self.device)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(
            [" ".join([*said, str(r.inputs()[0].is_cpu())]).encode()], np.object_))])
            for r in requests]
"""
)

_HEADER_LENGTH = "Inference-Header-Content-Length"
_FEW = 256
_SHOWN_SECONDS = 2

ARENA = 16 << 20
"""Bytes of each stub's arena."""

SMALL_ARENA = 2 << 20
LARGE_ARENA = 160 << 20

HANDLES = ("auto", "fd")
"""By what memory of a device crosses processes, legacy handles or descriptors; what a server does is the same."""


def write_device_model(repository, name, source, *, config="", gpus="", **tensors):
    """Write a model with an instance on each GPU of ``gpus`` (the first, if it is not said)."""
    group = f"instance_group [{{ kind: KIND_GPU gpus: [{gpus or 0}] }}]"
    return write_model(repository, name, source, config=f"{group}\n{config}", **tensors)


class DeviceServer:
    """A server on a simulated machine, and what is asked of both."""

    def __init__(self, server, machine):
        self.server = server
        self.machine = machine

    def infer(self, model, values, **request):
        """Send FP32 values; returns status, and the output or the error. Few are JSON, many are bytes."""
        values = np.asarray(values, np.float32)
        entry = {"name": "IN", "datatype": "FP32", "shape": list(values.shape)}
        if values.size <= _FEW:
            entry["data"] = values.ravel().tolist()
            return self._asked(model, json.dumps({"inputs": [entry], **request}), {})
        entry["parameters"] = {"binary_data_size": values.nbytes}
        parameters = {"binary_data_output": True, **request.pop("parameters", {})}
        header = json.dumps({"inputs": [entry], "parameters": parameters, **request}).encode()
        lengths = {_HEADER_LENGTH: str(len(header))}
        return self._asked(model, header + values.tobytes(), lengths)

    def _asked(self, model, body, headers):
        status, headers, answer = self.server.request(
            "POST", f"/v2/models/{model}/infer", body, headers
        )
        if status != 200:
            return status, json.loads(answer)["error"]
        length = int(headers.get(_HEADER_LENGTH, len(answer)))
        (output,) = json.loads(answer[:length])["outputs"]
        if "data" in output:
            return status, output["data"]
        return status, np.frombuffer(answer[length:], np.float32).tolist()

    def wait_until_complete(self, pid):
        """Wait until a stub has seen all GPU work complete that it handed on.

        A stub that is killed earlier loses that work, even if its kernels have ended: the server
        does not ask the driver about a dead process.
        """
        control = next(filter(_is_control_page, Path(f"/proc/{pid}/fd").iterdir()))
        segment = Segment.open(0, os.open(control, os.O_RDONLY), ControlPage.SIZE, writable=False)
        page = ControlPage(segment)
        try:
            wait_until(lambda: not any(page.events.pending), "GPU work to be complete", self.server)
        finally:
            page.close()

    def work(self, model):
        """Return the work on GPUs for a model: bytes and copies by kind, and waits."""
        page = self.server.metrics()
        labels = f'model="{model}",version="1"'
        found = {}
        for kind in ("h2d", "d2h", "d2d", "p2p"):
            for what in ("copied_bytes", "copies"):
                name = f'gpubridge_{what}_total{{kind="{kind}",{labels}}}'
                found[kind, what] = page.get(name, 0.0)
        found["waits"] = page.get(f"gpubridge_device_waits_total{{{labels}}}", 0.0)
        return found

    @contextmanager
    def doing(self, model, **expected):
        """Check what the block costs: ``h2d=(bytes, copies)`` and so on, ``waits=1``; else nothing."""
        nothing = {**dict.fromkeys(("h2d", "d2h", "d2d", "p2p"), (0, 0)), "waits": 0}
        before = self.work(model)
        yield
        # A stub shows what it has done when its answer has left.
        wanted = {**nothing, **expected}
        shown = poll(lambda: self._work_since(before, model) == wanted, _SHOWN_SECONDS)
        assert shown, self._work_since(before, model)

    def _work_since(self, before, model):
        after = self.work(model)
        done = {
            kind: (
                after[kind, "copied_bytes"] - before[kind, "copied_bytes"],
                after[kind, "copies"] - before[kind, "copies"],
            )
            for kind in ("h2d", "d2h", "d2d", "p2p")
        }
        done["waits"] = after["waits"] - before["waits"]
        return done


def _is_control_page(fd):
    # The stub may close others meanwhile.
    with suppress(FileNotFoundError):
        return "memfd:gpubridge" in str(fd.readlink()) and fd.stat().st_size == ControlPage.SIZE
    return False


@contextmanager
def running_device_server(
    repository,
    *flags,
    devices=2,
    delay_us=200,
    arena=ARENA,
    faults=(),
    tolerated="",
    peers=True,
    handles="auto",
    events="share",
    recorder="rerecord",
    switches=None,
    **options,
):
    """Serve a repository on a simulated machine; at the end, no rule of the driver was broken.

    ``tolerated`` are words of the one that may be; ``peers`` lets the GPUs reach each other;
    ``handles`` says by what their memory crosses processes, ``events`` whether models wait for each
    other on the GPU; it is not tried first. ``recorder`` says when those go on that wait for a killed
    process: when its events are recorded "rerecord", at once ("released"), or "never". ``switches`` are what
    else the driver does (`Machine.set`). Server and machine are lent as by `running_server`, and the machine is
    as it was afterwards: give ``own`` where a test looks at what a machine has from the start, or a server
    remembers a fault.
    """
    flags = (
        "--allow-client-shm=true",
        f"--backend-config=python,device-arena-bytes={arena}",
        f"--backend-config=python,device-events={events}",
        f"--backend-config=python,device-memory-handles={handles}",
        *flags,
    )

    before = []

    def prepare(machine):
        before.append(machine.state())
        machine.delay(delay_us)
        machine.set(**{"killed_recorder": recorder, **(switches or {})})
        for call, code in faults:
            machine.fail(call, code)

    def start(words, folder, environment, prepare=None, **started):
        machine = make_machine()
        machine.set_devices(devices)
        if peers:
            machine.allow_peers()
        if prepare is not None:
            prepare(machine)
            machine.tolerated = tolerated
        try:
            variables = {**machine.environment(), **(environment or {})}
            server = start_server(words, folder, variables, **started)
        except BaseException:
            machine.remove()
            raise
        server.machine = machine
        return server

    with running_server(
        repository, *flags, start=start, machine=(devices, peers), prepare=prepare, **options
    ) as server:
        machine = server.machine
        machine.tolerated = tolerated
        yield DeviceServer(server, machine)
        assert machine.violations() == [], machine.violations()
        if server.process.poll() is None:
            server.request("POST", "/v2/cudasharedmemory/unregister")
        machine.begin()
        machine.restore(before[0])
