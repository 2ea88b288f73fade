"""gpubridge doctor on a simulated machine: what its GPUs can do, what they cannot, and what to do."""

import pytest

from gpubridge.cuda_ipc import DeviceProbe
from gpubridge.doctor import findings as findings_of
from tests.simcuda.machine import lawful_machine
from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

EXAMINE = """
import dataclasses
from gpubridge.doctor import device_findings
answer = [dataclasses.asdict(finding) for finding in device_findings()]
"""
GPU_0 = [
    "GPU 0, tensors between processes",
    "GPU 0, order between processes",
    "GPU 0, order after a killed process",
    "GPU 0, pinned host memory",
]


def findings(machine, **variables):
    with running_worker(machine, variables) as worker:
        found = {finding["subject"]: finding for finding in worker.do(EXAMINE)}
    assert all(finding["detail"] for finding in found.values())
    assert not any(finding["needed"] for finding in found.values())
    return found


@pytest.fixture(scope="module")
def sound():
    """A sound machine whose first GPU was examined, and what was found."""
    with lawful_machine() as machine:
        yield machine, findings(machine, CUDA_VISIBLE_DEVICES="0")


def broken(found):
    return [subject for subject, finding in found.items() if not finding["works"]]


def test_everything_works_on_a_sound_machine(machine):
    machine.allow_peers()
    found = findings(machine)
    assert broken(found) == []
    assert found["GPUs"]["detail"].startswith("2 found (0: Simulated device 0, 1024 MiB, GPU-a0a1")
    assert "the driver knows CUDA 12.9" in found["cuda-python"]["detail"]
    assert set(GPU_0) < set(found)
    assert "GPU 1, order between processes" in found


@pytest.mark.parametrize(("version", "advice"), [("12.9.10", False), ("13.5.0", True)])
def test_bindings_for_a_newer_driver_are_named(monkeypatch, version, advice):
    monkeypatch.setattr(findings_of, "_version", lambda _: version)
    monkeypatch.setattr(findings_of, "driver_release", lambda: "12.4")
    finding = findings_of._bindings(DeviceProbe(1, ""))
    assert finding.works
    assert ("cuda-python<13" in finding.advice) is advice


def test_looking_makes_no_context_in_the_process_that_asks(sound):
    machine, _ = sound
    asking = machine.calls("cuDeviceGetCount")[0].pid
    assert machine.calls("cuDevicePrimaryCtxRetain", asking) == []
    assert len(machine.calls("cuDevicePrimaryCtxRetain")) == 4


@pytest.mark.parametrize(
    ("call", "code", "subjects", "text", "advice"),
    [
        ("cuIpcOpenEventHandle", 801, GPU_0[1:3], "NOT_SUPPORTED", "nothing to do"),
        ("cuLaunchHostFunc", 801, GPU_0[2:3], "NOT_SUPPORTED", "nothing to do"),
        ("cuMemHostRegister", 801, GPU_0[3:], "cannot be pinned", "container's limit"),
        ("cuDevicePrimaryCtxRetain", 2, GPU_0, "OUT_OF_MEMORY", ""),
    ],
)
def test_failed_checks_name_cause_and_remedy(machine, call, code, subjects, text, advice):
    machine.fail(call, code)
    found = findings(machine, CUDA_VISIBLE_DEVICES="0")
    assert broken(found) == subjects
    assert text in found[subjects[0]]["detail"]
    assert advice in found[subjects[0]]["advice"]


@pytest.mark.parametrize(
    ("handles", "fds", "works", "texts", "advice"),
    [
        (True, True, True, ["by legacy IPC handles", "VMM file descriptors, too"], ""),
        (True, False, True, ["by legacy IPC handles", "no VMM file descriptors: cu"], ""),
        (False, True, True, ["by VMM file descriptors", "WSL2"], "clients' CUDA shared memory"),
        (False, False, False, ["no legacy IPC handles: cu", "descriptors: cu"], "in host memory"),
    ],
)
def test_by_what_memory_crosses_is_told(sound, machine, handles, fds, works, texts, advice):
    if not handles:
        machine.refuse_legacy_handles()
    if not fds:
        machine.refuse_memory_fds()
    _, found = sound
    if not (handles and fds):
        found = findings(machine, CUDA_VISIBLE_DEVICES="0")
    memory = found[GPU_0[0]]
    assert memory["works"] is works
    assert found[GPU_0[1]]["works"] is works
    assert all(text in memory["detail"] for text in texts)
    assert advice in memory["advice"]
    assert bool(memory["advice"]) is bool(advice)


def test_devices_that_do_not_reach_each_other_are_named(machine):
    found = findings(machine)
    assert broken(found) == ["GPUs among themselves"]
    assert found["GPUs among themselves"]["detail"].endswith("0 and 1")


def test_one_device_has_no_peers(sound):
    _, found = sound
    assert found["GPUs"]["detail"].startswith("1 found (0: Simulated device 0")
    assert "GPUs among themselves" not in found


def test_exclusive_devices_are_not_tried_but_told(machine):
    machine.make_exclusive()
    found = findings(machine, CUDA_VISIBLE_DEVICES="0")
    assert broken(found) == ["GPU 0, several processes"]
    assert "-c DEFAULT" in found["GPU 0, several processes"]["advice"]
    assert machine.calls("cuDevicePrimaryCtxRetain") == []


def test_a_driver_that_does_not_begin_says_why(machine):
    machine.fail("cuInit", 803)
    found = findings(machine)
    assert "SYSTEM_DRIVER_MISMATCH" in found["GPUs"]["detail"]
    assert "restart the machine" in found["GPUs"]["detail"]
