"""The driver is loaded when asked for; what it refuses is a typed error that says what to do."""

import subprocess
import sys

import pytest

from gpubridge.cuda_ipc import CudaError, DriverAbsent, list_devices, probe_devices
from gpubridge.cuda_ipc.devices import _uuid_text
from gpubridge.errors import ErrorCode
from tests.simcuda.processes import running_worker
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")


def told_by(machine, code):
    """Have a process of the machine run some code; returns its `answer`."""
    with running_worker(machine) as worker:
        return worker.do(f"from gpubridge.cuda_ipc import *\n{code}")


LOADED = "any('libcuda' in l or '/cuda/bindings' in l for l in open('/proc/self/maps'))"


def test_nothing_is_loaded_before_something_is_asked(machine):
    code = f"import gpubridge.cuda_ipc as c; print({LOADED}); c.probe_devices(); print({LOADED})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=machine.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_looking_at_devices_makes_no_context(machine):
    text = told_by(machine, "answer = str(probe_devices())")
    assert "DeviceProbe(count=2, reason='', devices=(DeviceInfo(ordinal=0, uuid='GPU-a0a1" in text
    assert "name='Simulated device 1', nbytes=1073741824)" in text
    assert machine.calls("cuDevicePrimaryCtxRetain") == []


def test_no_driver_is_a_value_with_a_reason():
    probe = probe_devices()
    if probe.count:
        pytest.skip("this machine has a GPU")
    assert probe.devices == ()
    assert probe.reason.startswith(("no CUDA driver: ", "cuInit failed: "))
    with pytest.raises((DriverAbsent, CudaError)):
        list_devices()


def test_no_cuda_python_is_a_value_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr("gpubridge.cuda_ipc.driver._loaded", None)
    probe = probe_devices()
    assert probe.reason.startswith("cuda-python cannot be imported")
    assert probe.reason.endswith("pip install 'gpubridge[gpu]'")
    with pytest.raises(DriverAbsent) as raised:
        list_devices()
    assert raised.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["12.9.0", "12.6", "9.9.9.post1"])
def test_bindings_that_hold_the_interpreter_while_they_wait_are_refused(monkeypatch, version):
    monkeypatch.setattr("cuda.bindings.__version__", version)
    monkeypatch.setattr("gpubridge.cuda_ipc.driver._loaded", None)
    reason = probe_devices().reason
    assert reason.startswith(f"cuda-python {version} is too old")
    assert "expected 12.9.1 or newer: pip install" in reason


@pytest.mark.parametrize(
    ("code", "name", "advice"),
    [
        (100, "NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (34, "STUB_LIBRARY", "LD_LIBRARY_PATH"),
        (3, "NOT_INITIALIZED", "fork"),
        (803, "SYSTEM_DRIVER_MISMATCH", "restart the machine"),
        (999, "UNKNOWN", "nvidia-uvm"),
    ],
)
def test_a_driver_that_does_not_begin_says_why(machine, code, name, advice):
    machine.fail("cuInit", code)
    text = told_by(machine, "answer = probe_devices().reason")
    assert text.startswith(f"cuInit failed: CUDA_ERROR_{name} ({code}): ")
    assert advice in text


def test_a_machine_without_devices(machine):
    machine.set_devices(0)
    text = told_by(machine, "answer = probe_devices().reason")
    assert "CUDA_ERROR_NO_DEVICE" in text


def test_devices_are_found_by_their_uuid_whatever_their_order(machine):
    seen = told_by(
        machine, "answer = {each.uuid: find_device(each.uuid).ordinal for each in list_devices()}"
    )
    with running_worker(machine, {"CUDA_VISIBLE_DEVICES": "1,0"}) as worker:
        there = worker.do(
            "from gpubridge.cuda_ipc import *; answer = [find_device(u).ordinal for u in told]",
            list(seen),
        )
    assert list(seen.values()) == [0, 1]
    assert there == [1, 0]
    with (
        running_worker(machine, {"CUDA_VISIBLE_DEVICES": "1"}) as worker,
        pytest.raises(RuntimeError, match="is not seen by this process, which sees GPU-a0a1"),
    ):
        worker.do("from gpubridge.cuda_ipc import *; find_device(told)", next(iter(seen)))


def test_a_part_of_a_gpu_is_known_as_such():
    raw = bytes(range(16))
    assert _uuid_text("NVIDIA H200", raw) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert _uuid_text("NVIDIA H200 MIG 1g.18gb", raw).startswith("MIG-00010203-")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (2, ["CUDA_ERROR_OUT_OF_MEMORY", False, "UNAVAILABLE"]),
        (1, ["CUDA_ERROR_INVALID_VALUE", False, "INTERNAL"]),
        (700, ["CUDA_ERROR_ILLEGAL_ADDRESS", True, "INTERNAL"]),
        (719, ["CUDA_ERROR_LAUNCH_FAILED", True, "INTERNAL"]),
        (721, ["CUDA_ERROR_TENSOR_MEMORY_LEAK", True, "INTERNAL"]),
        (810, ["CUDA_ERROR_MPS_CLIENT_TERMINATED", True, "INTERNAL"]),
    ],
)
def test_errors_carry_call_code_and_name(device_process, machine, code, expected):
    machine.fail("cuMemAlloc", code)
    assert device_process.do("answer = attributes(mine, 1)") == ["cuMemAlloc", code, *expected]


@pytest.mark.parametrize("sticks", [False, True])
def test_an_unknown_error_that_stays_means_a_device_that_is_lost(machine, sticks):
    machine.set(unknown="sticks" if sticks else "passes")
    with device_worker(machine) as worker:
        machine.fail("cuMemAlloc", 999, nth=1)
        assert worker.do("answer = attributes(mine, 1)")[3:] == [sticks, "INTERNAL"]
        if sticks:
            with pytest.raises(RuntimeError, match=r"999.*fell off the bus.*started again"):
                worker.do("mine(1)")
        else:
            worker.do("mine(1).close()")


def test_an_unknown_error_before_there_is_a_context_says_nothing_of_the_device(machine):
    machine.set(lost_device=1)
    with device_worker(machine) as worker:
        assert worker.do("answer = attributes(DeviceContext, list_devices()[1])")[3] is False
        machine.set(lost_device=0)
        assert worker.do("answer = attributes(mine, 1)")[3] is True


def test_errors_after_which_a_process_has_to_end_are_known(machine):
    told = told_by(
        machine,
        "said = {int(code): ' '.join((code.__doc__ or '').split()) for code in d.CUresult}\n"
        "answer = [code for code in said if 'must be terminated and relaunched' in said[code]]",
    )
    if not told:
        pytest.skip("these bindings do not describe errors")
    # 810: the MPS server has ended this client.
    assert {700, 719, 810} <= set(told)
    assert told == [code for code in told if CudaError("cuInit", code, "name").sticky]


@pytest.mark.parametrize("code", [35, 200, 209, 222])
def test_code_for_another_release_comes_with_the_extra_that_fits(device_process, machine, code):
    machine.fail("cuMemAlloc", code)
    with pytest.raises(RuntimeError, match=r"gpubridge doctor.*\[image-gpu-cu12\]"):
        device_process.do("mine(1)")


def test_a_code_that_the_bindings_do_not_know_is_an_error_too(machine):
    with device_worker(machine) as worker:
        machine.fail("cuMemAlloc", 12345)
        name, status, text, sticky, code = worker.do("answer = attributes(mine, 1)")
    assert (name, status, sticky, code) == ("cuMemAlloc", 12345, False, "INTERNAL")
    assert "12345" in text


def test_a_function_that_the_driver_lacks_is_an_error_with_what_to_do(machine):
    with (
        device_worker(machine) as worker,
        pytest.raises(RuntimeError, match=r"cuMemAllocManaged failed: .* update the NVIDIA driver"),
    ):
        worker.do("from gpubridge.cuda_ipc.driver import call; call('cuMemAllocManaged', 1, 1)")


def test_a_context_is_retained_once_and_released_once(machine):
    with device_worker(machine) as worker:
        worker.do("context.make_current(); context.close(); context.close()")
        assert worker.do("answer = int(ok(d.cuCtxGetCurrent()))") == 0
        with pytest.raises(RuntimeError, match="is closed"):
            worker.do("context.make_current()")
    assert len(machine.calls("cuDevicePrimaryCtxRetain")) == 1
    assert len(machine.calls("cuDevicePrimaryCtxRelease")) == 1


def test_the_current_context_is_restored(machine):
    with device_worker(machine) as worker:
        assert worker.do(
            "other = DeviceContext(list_devices()[1]); other.make_current()\n"
            "answer = []\n"
            "look = lambda: answer.append(int(ok(d.cuCtxGetDevice())))\n"
            "look()\n"
            "with context.pushed():\n"
            "    look()\n"
            "    with context.pushed(): look()\n"
            "    look()\n"
            "try:\n"
            "    with context.pushed(): raise KeyError\n"
            "except KeyError: look()"
        ) == [1, 0, 0, 0, 1]
    assert len(machine.calls("cuCtxPushCurrent")) == len(machine.calls("cuCtxPopCurrent")) == 2


def test_only_the_device_that_is_used_gets_a_context(machine):
    with device_worker(machine, 1) as worker:
        worker.do("s = mine(1); copies = CopyStream(context); copies.close(); s.close()")
        states = "answer = [ok(d.cuDevicePrimaryCtxGetState(i))[1] for i in (0, 1)]"
        assert worker.do(states) == [0, 1]


def test_access_that_a_library_has_given_to_a_peer_is_no_error(machine):
    machine.allow_peers()
    with device_worker(machine) as worker:
        worker.do(
            "peer = DeviceContext(list_devices()[1])\n"
            "with context.pushed(): ok(d.cuCtxEnablePeerAccess(peer.raw, 0))\n"
            "enable_peer_access(context, peer)"
        )
    results = [call.result for call in machine.calls("cuCtxEnablePeerAccess")]
    assert results == [0, 704]
