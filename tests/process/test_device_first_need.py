"""Nothing is made on a GPU before somebody needs it there, and the arena is as large as its use."""

from pathlib import Path

import pytest

from tests.process.controlled import control, only
from tests.process.device_models import (
    ARENA,
    LARGE_ARENA,
    LIBRARY,
    running_device_server,
    write_device_model,
)
from tests.process.model_sources import answering
from tests.process.server import wait_until, write_code_model, write_model
from tests.process.test_device_edges import HOST, IN_ARENA, ensemble
from tests.process.test_device_network import pids_of

MIB = 1 << 20
FIRST = 32 * MIB

NUMPY = answering(
    """
assert self.args["model_instance_kind"] == "GPU"
given = request.inputs()[0]
through = pb_utils.Tensor.from_dlpack("OUT", given.to_dlpack())
assert given.is_cpu() and through.is_cpu()
return respond(OUT=value * 2)
"""
)

# Adds to its input how many calls of Python lie around its own; for 0 it has a tensor on the GPU first.
DEPTH = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        frame, depth = sys._getframe(), 0
        while frame is not None:
            frame, depth = frame.f_back, depth + 1
        return [self.answer(request, depth) for request in requests]

    def answer(self, request, depth):
        given = request.inputs()[0].as_numpy()
        if given[0] == 0:
            pb_utils.Tensor.empty("T", [1], np.uint8, "cuda")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given + np.float32(depth))])
"""

# Forks before it touches the GPU; the child uses that, and the parent afterwards.
FORKING = (
    LIBRARY
    + """
import multiprocessing

def child(results):
    # No process before it has touched the GPU: else this is error 3.
    library = Library()
    pointer = ok(d.cuMemAlloc(64))
    ok(d.cuMemsetD8(pointer, 7, 64))
    host = np.empty(64, np.uint8)
    ok(d.cuMemcpyDtoH(host, pointer, 64))
    results.put(int(host.sum()))

def idle_child(results):
    results.put(int(np.ones(9).sum()))

class TritonPythonModel:
    def initialize(self, args):
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        said = []
        for target in (child, idle_child):
            process = context.Process(target=target, args=(results,))
            process.start()
            said.append(results.get(timeout=60))
            process.join()
            assert process.exitcode == 0, process.exitcode
        assert said == [7 * 64, 9], said

    def execute(self, requests):
        # Here the parent needs it.
        answers = []
        for request in requests:
            given = request.inputs()[0]
            tensor = pb_utils.Tensor.empty("OUT", given.shape(), np.float32, "cuda")
            ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(0))))))
            pointer = tensor.__cuda_array_interface__["data"][0]
            values = 2 * np.ascontiguousarray(given.as_numpy())
            ok(d.cuMemcpyHtoD(pointer, values, values.nbytes))
            answers.append(pb_utils.InferenceResponse([tensor]))
        return answers
"""
)

# Makes a tensor of as many MiB as it is told, keeps as many as it is told, and says how many it has.
HOARD = answering(
    """
mib, keep = map(int, value)
del self.kept[keep:]
tensor = pb_utils.Tensor.empty("T", [mib << 20], np.uint8, "cuda")
if keep > len(self.kept):
    self.kept.append(tensor)
return respond(OUT=np.array([len(self.kept)], np.float32))
""",
    "self.kept = []",
)


def test_nothing_is_on_a_gpu_before_a_model_uses_it(tmp_path):
    models = [f"numpy_{number}" for number in range(2)]
    for model in models:
        # No instance group: KIND_GPU on each GPU, as at Triton.
        write_model(tmp_path, model, NUMPY)
    write_device_model(tmp_path, "used", IN_ARENA)
    write_code_model(tmp_path, config="instance_group [{ kind: KIND_CPU }]")
    costs = {"context_mib": 100, "context_us": 100_000}
    with running_device_server(tmp_path, *only("m"), switches=costs, own=True) as served:
        # A server without models on a GPU loads nothing of it.
        assert served.server.ask("self.said = 1") == (200, "1")
        assert "libcuda" not in Path(f"/proc/{served.server.pid}/maps").read_text()
        assert served.machine.calls() == []
        for model in models:
            assert control(served.server, "load", model) == (200, "")
            for _ in range(3):
                assert served.infer(model, [1.0, 2.0]) == (200, [2.0, 4.0])
        assert served.machine.contexts() == []
        assert served.machine.used(0) == served.machine.used(1) == 0
        made = {"cuDevicePrimaryCtxRetain", "cuMemAlloc", "cuMemCreate", "cuEventCreate"}
        pinned = {"cuMemHostRegister"}
        assert not {call.name for call in served.machine.calls()} & (made | pinned)
        pids = {pid for model in models for pid in pids_of(served, model)}
        # Not even the driver is loaded there: whoever forks may use it.
        assert not {call.pid for call in served.machine.calls("cuInit")} & pids
        # A model that uses it takes what it needs, and no other process does.
        assert control(served.server, "load", "used") == (200, "")
        assert served.infer("used", [1.0]) == (200, [2.0])
        (pid,) = pids_of(served, "used")
        assert sorted(set(served.machine.contexts())) == sorted({pid, served.server.pid})
        assert ARENA <= served.machine.used(0) - 2 * 100 * MIB < 2 * ARENA
        assert served.machine.used(1) == 0
        # By handles, since both kinds work.
        assert "crosses processes by legacy IPC handles\n" in served.server.log()
        assert served.machine.calls("cuMemCreate") == []


def depth(served, model, value=1.0):
    status, (answer,) = served.infer(model, [value])
    assert status == 200
    return answer - value


def test_a_gpu_that_is_not_used_costs_a_request_nothing(tmp_path):
    kinds = {"gpu": "", "cpu": "instance_group [{ kind: KIND_CPU }]"}
    for kind, config in kinds.items():
        for name in ("one", "two"):
            write_model(tmp_path, f"{kind}_{name}", DEPTH, config=config)
        ensemble(tmp_path, f"{kind}_both", [f"{kind}_one", f"{kind}_two"])
    with running_device_server(tmp_path) as served:
        for model in ("one", "two", "both"):
            # As many calls of Python around the model's own: none but the loop's for a request.
            assert depth(served, f"gpu_{model}") == depth(served, f"cpu_{model}")
        assert not set(served.machine.contexts()) & set(served.server.stubs())


def test_the_loop_changes_with_the_first_tensor_on_the_gpu(tmp_path):
    write_model(tmp_path, "m", DEPTH)
    with running_device_server(tmp_path) as served:
        before = depth(served, "m")
        assert depth(served, "m", 0.0) == before
        after = depth(served, "m")
        # Compiled code executes no batch any more, if there is such code.
        assert after > before or "it runs slower" in served.server.log()
        assert [depth(served, "m") for _ in range(3)] == [after] * 3


def test_the_first_request_of_an_ensemble_may_make_the_first_tensor_on_the_gpu(tmp_path):
    for name in ("first", "second"):
        write_device_model(tmp_path, name, IN_ARENA)
    ensemble(tmp_path, "both", ["first", "second"])
    with running_device_server(tmp_path) as served:
        for value in (1.0, 2.0):
            with served.doing("first"), served.doing("second", d2h=(8, 1), waits=1):
                assert served.infer("both", [value, 1.0]) == (200, [4 * value, 4.0])


def test_a_consumer_allocates_no_arena_of_its_own(tmp_path):
    write_device_model(tmp_path, "maker", IN_ARENA)
    source = NUMPY.replace("assert given.is_cpu() and through.is_cpu()", "").replace(
        "given.to_dlpack()", "np.zeros(1)"
    )
    write_device_model(tmp_path, "reader", source)
    ensemble(tmp_path, "both", ["maker", "reader"])
    with running_device_server(tmp_path, arena=LARGE_ARENA) as served:
        assert served.infer("both", [1.0]) == (200, [4.0])
        pids = {*pids_of(served, "maker"), *pids_of(served, "reader"), served.server.pid}
        assert set(served.machine.contexts(0)) == pids
        assert served.machine.used(0) < 2 * FIRST


def test_a_model_forks_before_it_touches_the_gpu(tmp_path):
    write_device_model(tmp_path, "forking", FORKING)
    with running_device_server(tmp_path) as served:
        assert served.infer("forking", [1.0, 2.0]) == (200, [2.0, 4.0])


def test_an_arena_grows_by_use_up_to_its_limit(tmp_path):
    write_device_model(tmp_path, "hoard", HOARD)
    with running_device_server(tmp_path, arena=LARGE_ARENA) as served:

        def used():
            return served.machine.used(0) // MIB

        assert served.infer("hoard", [20, 1]) == (200, [1])
        assert used() == 32
        # No room beside the other; each further one is as large as all before.
        assert served.infer("hoard", [20, 2]) == (200, [2])
        assert used() == 64
        assert served.infer("hoard", [60, 3]) == (200, [3])
        assert used() == 128
        # What is idle is used again.
        assert served.infer("hoard", [60, 2]) == (200, [2])
        assert used() == 128
        assert served.infer("hoard", [30, 3]) == (200, [3])
        assert served.infer("hoard", [30, 4]) == (200, [4])
        assert used() == 128
        status, error = served.infer("hoard", [40, 5])
        assert status == 500
        total, in_use = LARGE_ARENA, 100 * MIB
        assert (
            f"device memory arena is full: {40 * MIB} bytes asked for, {in_use} of {total}" in error
        )
        assert f"the largest free piece has {32 * MIB}; send fewer" in error
        status, error = served.infer("hoard", [161, 0])
        assert status == 500
        assert f"device memory arena of {total} bytes is too small: {161 * MIB} bytes" in error
        assert "device-arena-bytes=N" in error


def test_idle_segments_make_way_for_one_that_is_larger(tmp_path):
    write_device_model(tmp_path, "hoard", HOARD)
    with running_device_server(tmp_path, arena=LARGE_ARENA) as served:
        for number in (1, 2, 3):
            assert served.infer("hoard", [30, number]) == (200, [number])
        assert served.machine.used(0) // MIB == 128
        # It fits beside the first segment only, which has the events.
        assert served.infer("hoard", [120, 0]) == (200, [0])
        wait_until(lambda: served.machine.used(0) // MIB == 152, "the others to go", served.server)
        assert served.infer("hoard", [120, 1]) == (200, [1])
        assert served.infer("hoard", [30, 2]) == (200, [2])


def test_a_request_that_gets_no_device_memory_fails_alone(tmp_path):
    write_device_model(tmp_path, "hoard", HOARD)
    with running_device_server(tmp_path, arena=LARGE_ARENA) as served:
        served.machine.set_memory(100 * MIB)
        (pid,) = pids_of(served, "hoard")
        status, error = served.infer("hoard", [150, 1])
        assert status == 500
        assert "device-arena-bytes=N" in error
        # The server was asked once, however long the model waited for room.
        asked = [call for call in served.machine.calls("cuMemAlloc") if call.result]
        assert len(asked) == 1
        assert served.infer("hoard", [20, 1]) == (200, [1])
        assert pids_of(served, "hoard") == [pid]


def test_a_gpu_that_a_model_hides_from_itself_is_done_without(tmp_path):
    hidden = IN_ARENA.replace(
        "import ctypes, os", "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport ctypes, os"
    )
    hidden = hidden.replace("self.library = Library(args)", "pass").replace(
        "def execute", "def unused"
    ) + (
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', 2 * r.inputs()[0].as_numpy())])\n"
        "                for r in requests]\n"
    )
    write_device_model(tmp_path, "hidden", hidden)
    write_device_model(tmp_path, "maker", IN_ARENA)
    ensemble(tmp_path, "both", ["maker", "hidden"])
    with running_device_server(tmp_path) as served:
        assert served.infer("hidden", [1.0]) == (200, [2.0])
        # The first finds out that it cannot be handed on there; others go by way of the host.
        status, error = served.infer("both", [1.0])
        assert status == 500
        assert "check CUDA_VISIBLE_DEVICES" in error
        for _ in range(3):
            assert served.infer("both", [1.0]) == (200, [4.0])
        name = 'gpubridge_fallbacks_total{model="hidden",reason="device_absent",version="1"}'
        assert served.server.metrics()[name] == 1


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuInit"])
def test_a_model_without_memory_for_its_context_is_brought_tensors_in_host_memory(tmp_path, call):
    write_device_model(tmp_path, "maker", IN_ARENA)
    write_device_model(tmp_path, "reader", HOST)
    ensemble(tmp_path, "both", ["maker", "reader"])
    with running_device_server(tmp_path) as served:
        assert served.infer("maker", [1.0]) == (200, [2.0])
        served.machine.fail(call, 2)
        # The first finds that out.
        assert served.infer("both", [1.0])[0] in (200, 503)
        for _ in range(3):
            assert served.infer("both", [1.0]) == (200, [4.0])
        name = 'gpubridge_fallbacks_total{model="reader",reason="device_memory_full",version="1"}'
        assert served.server.metrics()[name] == 1
        served.machine.heal()
        assert served.infer("both", [2.0]) == (200, [8.0])


def test_a_driver_that_lacked_memory_once_is_asked_again(tmp_path):
    write_device_model(tmp_path, "maker", IN_ARENA)
    with running_device_server(tmp_path) as served:
        served.machine.fail("cuInit", 2)
        status, error = served.infer("maker", [1.0])
        assert status in (500, 503)
        assert "cuInit failed: CUDA_ERROR_OUT_OF_MEMORY" in error
        served.machine.heal()
        assert served.infer("maker", [1.0]) == (200, [2.0])
